// Where prompt tokens came from: names, bars, legends. Each source has a colour, a pattern and a letter.

import { h } from "./dom.js";
import { count, percent } from "./format.js";

export const SOURCES = [
  { id: "memory", label: "memory", letter: "M" },
  { id: "store", label: "store", letter: "S" },
  { id: "engine", label: "another engine", letter: "E" },
  { id: "computed", label: "computed", letter: "C" },
];
const BY_ID = new Map(SOURCES.map((source) => [source.id, source]));
export const sourceOf = (id) => BY_ID.get(id) ?? { id: "computed", label: id, letter: "?" };

const MISSING = {
  state_missing: "no state there",
  window_missing: "window pages gone",
  tap_missing: "hidden states gone",
  never_seen: "never seen",
  below_block: "below one block",
  evicted: "evicted",
};
export const MISSING_CODES = Object.keys(MISSING);
export const missingLabel = (code) => (code === null || code === undefined ? "–" : (MISSING[code] ?? code.replaceAll("_", " ")));

/** Tokens by source, of a prompt's spans. */
export function bySource(spans) {
  const sums = Object.fromEntries(SOURCES.map(({ id }) => [id, 0]));
  for (const { start, end, source } of spans) sums[source] = (sums[source] ?? 0) + end - start;
  return sums;
}

function segment(source, start, end, total) {
  const { id, label, letter } = sourceOf(source);
  const share = (end - start) / total;
  return h("span", {
    class: `segment source-${id}`,
    title: `${label}: tokens ${count(start)} to ${count(end)}`,
    style: { left: `${(100 * start) / total}%`, width: `${100 * share}%` },
  }, share > 0.05 ? h("span", { class: "letter" }, letter) : null);
}

export function describe(sums) {
  const total = Object.values(sums).reduce((a, b) => a + b, 0);
  const parts = SOURCES.filter(({ id }) => sums[id] > 0).map(({ id, label }) => `${count(sums[id])} ${label}`);
  return `${count(total)} prompt tokens: ${parts.join(", ")}`;
}

/** A small stacked bar of tokens by source. */
export function sumsBar(sums) {
  const total = Math.max(1, Object.values(sums).reduce((a, b) => a + b, 0));
  let at = 0;
  const parts = SOURCES.filter(({ id }) => sums[id] > 0).map(({ id }) => {
    at += sums[id];
    return segment(id, at - sums[id], at, total);
  });
  return h("span", { class: "bar", role: "img", "aria-label": describe(sums) }, parts);
}

const mark = (kind, position, total, title) =>
  h("span", { class: `mark mark-${kind}`, title, style: { left: `${(100 * position) / total}%` } });

/** The bar of one prompt, with breakpoints; with `lookup` also its checkpoint, the match and what was evicted. */
export function promptBar(prompt, lookup = null) {
  const total = Math.max(1, prompt.prompt_tokens);
  const marks = prompt.breakpoints.map((p) => mark("breakpoint", p, total, `breakpoint at ${count(p)}`));
  if (lookup?.checkpoint) {
    const { position, kind, hits } = lookup.checkpoint;
    marks.push(mark("checkpoint", position, total, `checkpoint (${kind}) at ${count(position)}, ${count(hits)} hits`));
  }
  for (const gone of lookup?.evicted ?? []) {
    marks.push(mark("evicted", gone.position, total, `${gone.what} evicted at ${count(gone.position)}`));
  }
  if (lookup && lookup.matched_tokens > lookup.position) {
    marks.push(mark("matched", lookup.matched_tokens, total, `the cached text matches up to ${count(lookup.matched_tokens)}`));
  }
  const spans = prompt.spans.map(({ start, end, source }) => segment(source, start, end, total));
  return h("div", { class: "bar tall", role: "img", "aria-label": describe(bySource(prompt.spans)) }, spans, marks);
}

/** A legend with tokens and shares. */
export function legend(sums) {
  const total = Object.values(sums).reduce((a, b) => a + b, 0);
  return h("ul", { class: "legend" }, SOURCES.filter(({ id }) => sums[id] > 0).map(({ id, label, letter }) =>
    h("li", null, h("span", { class: `swatch source-${id}` }, letter), `${label} `,
      h("b", null, count(sums[id])), h("span", { class: "dim" }, ` ${percent(sums[id], total)}`))));
}

const MARKS = {
  breakpoint: "breakpoint",
  checkpoint: "checkpoint that was used",
  matched: "end of the matching text",
  evicted: "evicted",
};

export function markLegend(kinds) {
  return h("ul", { class: "legend" }, kinds.map((kind) =>
    h("li", null, h("span", { class: `swatch-mark` }, h("span", { class: `mark mark-${kind}` })), MARKS[kind])));
}
