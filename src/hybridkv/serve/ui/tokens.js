// The tokens of a prompt, coloured by source. Long runs are folded; the page never holds more than MAX_SPANS of them.

import { getTokens } from "./api.js";
import { h, put } from "./dom.js";
import { count } from "./format.js";
import { sourceOf } from "./sources.js";

const MAX_SPANS = 3000;
const FOLD_KEEPS = 120;
const UNFOLD_STEP = 500;
const PAGE = 4096;

class Texts {
  constructor(id, prompt) {
    this.id = id;
    this.prompt = prompt;
    this.pages = new Map();
  }

  async get(start, end) {
    const texts = [];
    for (let page = Math.floor(start / PAGE); page * PAGE < end; page += 1) {
      if (!this.pages.has(page)) this.pages.set(page, getTokens(this.id, this.prompt, page * PAGE, (page + 1) * PAGE));
      const { texts: all } = await this.pages.get(page);
      texts.push(...all.slice(Math.max(0, start - page * PAGE), Math.max(0, end - page * PAGE)));
    }
    return texts;
  }
}

/** Pieces of a prompt: [start, end, source, isFolded]. */
function pieces(spans) {
  const keep = Math.max(1, Math.min(FOLD_KEEPS, Math.floor(MAX_SPANS / (2 * Math.max(1, spans.length)))));
  return spans.flatMap(({ start, end, source }) => {
    if (end - start <= 3 * keep) return [[start, end, source, false]];
    return [[start, start + keep, source, false], [start + keep, end - keep, source, true], [end - keep, end, source, false]];
  });
}

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");

/** An element that shows the tokens of prompt `number` of request `id`. */
export function tokenView(id, number, prompt) {
  const texts = new Texts(id, number);
  const breakpoints = new Set(prompt.breakpoints);
  const box = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Prompt tokens by source" }, "…");
  let parts = pieces(prompt.spans.slice(0, MAX_SPANS / 2));

  function unfold(index) {
    const [start, end, source] = parts[index];
    const room = MAX_SPANS - parts.reduce((sum, [a, b, , folded]) => sum + (folded ? 0 : b - a), 0);
    const size = Math.min(UNFOLD_STEP, room, end - start);
    if (size <= 0) return;
    const opened = [[start, start + size, source, false]];
    if (start + size < end) opened.push([start + size, end, source, true]);
    parts.splice(index, 1, ...opened);
    draw();
  }

  function fold(index, [start, end, source]) {
    const marks = prompt.breakpoints.filter((p) => start <= p && p < end).length;
    const text = `… ${count(end - start)} more tokens${marks ? `, ${marks} breakpoints` : ""} …`;
    return h("button", { type: "button", class: `fold token-${source}`, onclick: () => unfold(index) }, text);
  }

  async function run([start, end, source]) {
    const { label } = sourceOf(source);
    const tokens = (await texts.get(start, end)).map((text, i) => {
      const token = h("span", { class: `token token-${source}`, title: `${count(start + i)}: ${label}` }, visible(text));
      const breakpoint = breakpoints.has(start + i) && h("span", { class: "break", title: `breakpoint at ${count(start + i)}` }, "¦");
      return breakpoint ? [breakpoint, token] : token;
    });
    return h("span", { class: "run", "data-source": source },
      h("span", { class: "visually-hidden" }, ` [${label}: tokens ${start} to ${end}] `), tokens);
  }

  async function draw() {
    try {
      const drawn = await Promise.all(parts.map((part, i) => (part[3] ? fold(i, part) : run(part))));
      put(box, drawn);
    } catch (error) {
      put(box, h("p", { class: "dim" }, `No text of these tokens: ${error.message}`));
    }
  }

  draw();
  return box;
}
