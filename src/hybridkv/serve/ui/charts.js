// Bars over time on a canvas: hits and misses of requests, and the steps of the engine.

import { cssColor, h } from "./dom.js";
import { clock, count, seconds } from "./format.js";
import { patterned, prepare } from "./paint.js";
import { MISSING_CODES, missingLabel } from "./sources.js";

const HIT_PARTS = [["memory", "--memory", null], ["store", "--store", "slash"], ["engine", "--engine", "cross"]];
const MISS_PATTERNS = [null, "slash", "backslash", "rows", "cross", "backslash", "slash"];
const MISSES = [...MISSING_CODES, "other"];
const STEP_PARTS = [["schedule", "--hue-1", "slash"], ["model", "--hue-0", null], ["sample", "--hue-3", "backslash"], ["commit", "--hue-2", "rows"]];
const NUM_STEPS = 300;
const MOST_BARS = 100;
const WIDEST_BAR = 24;

function fills(context, parts) {
  return parts.map(([, color, pattern]) => patterned(context, cssColor(color), pattern));
}

function readoutCanvas(label, hint, describe) {
  const readout = h("p", { class: "readout dim" }, hint);
  const canvas = h("canvas", { class: "chart", role: "img", "aria-label": label,
    onpointermove: (event) => { readout.textContent = describe(event.offsetX / canvas.clientWidth) ?? hint; },
    onpointerleave: () => { readout.textContent = hint; } });
  return { canvas, element: h("div", null, canvas, readout) };
}

/** Text at the left edge, readable on top of bars. */
function note(context, text, y) {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = cssColor("--page");
  context.fillRect(0, y - 11, context.measureText(text).width + 5, 14);
  context.fillStyle = cssColor("--dim");
  context.fillText(text, 2, y);
}

const swatch = (name) => h("span", { class: `swatch ${name}` });

/** Tokens of requests: hits above the line, misses by reason below it. */
export function hitChart() {
  let bars = [];
  /** Pixels from one bar to the next. */
  const pitch = (width) => Math.min(WIDEST_BAR + 1, width / Math.max(1, bars.length));
  const hint = "Newest request at the right. Above the line: cached tokens. Below: computed tokens by reason.";
  const { canvas, element } = readoutCanvas("Cached and computed tokens of the last requests", hint, (x) => {
    const bar = bars[bars.length - 1 - Math.floor(((1 - x) * canvas.clientWidth) / pitch(canvas.clientWidth))];
    return bar && `${clock(bar.created)}: ${count(bar.cached_tokens)} of ${count(bar.prompt_tokens)} tokens cached; missing: ${missingLabel(bar.missing)}`;
  });

  function draw(summaries) {
    bars = summaries.slice(0, MOST_BARS).reverse();
    if (canvas.clientWidth === 0) return;
    const { context, width, height } = prepare(canvas, 120);
    const up = fills(context, HIT_PARTS);
    const down = MISS_PATTERNS.map((pattern, i) => patterned(context, cssColor(`--miss-${i}`), pattern));
    const most = Math.max(1, ...bars.map((bar) => Math.max(bar.prompt_tokens - bar.by_source.computed, bar.by_source.computed)));
    const middle = Math.round(height / 2);
    const scale = (middle - 4) / most;
    const step = pitch(width);
    const left = width - step * bars.length;
    bars.forEach((bar, i) => {
      let y = middle;
      const wide = Math.max(1, step - 1);
      HIT_PARTS.forEach(([source], k) => {
        const tall = (bar.by_source[source] ?? 0) * scale;
        context.fillStyle = up[k];
        context.fillRect(left + i * step, y - tall, wide, tall);
        y -= tall;
      });
      const reason = MISSING_CODES.indexOf(bar.missing);
      context.fillStyle = down[reason < 0 ? MISSES.length - 1 : reason];
      context.fillRect(left + i * step, middle, wide, bar.by_source.computed * scale);
    });
    context.fillStyle = cssColor("--dim");
    context.fillRect(0, middle, width, 1);
    if (bars.length > 0) note(context, `scale: ${count(most)} tokens`, 11);
  }

  const names = h("ul", { class: "legend" },
    ["memory", "store", "engine"].map((id) => h("li", null, swatch(`source-${id}`), id === "engine" ? "another engine" : id)),
    MISSES.map((code, i) => h("li", null, swatch(`miss-${i} pattern-${MISS_PATTERNS[i] ?? "plain"}`), code === "other" ? "last block" : missingLabel(code))));
  return { element: h("div", null, element, names), draw };
}

/** The last steps of the engine: time by part above, tokens below. */
export function stepChart() {
  let steps = [];
  const hint = "Newest step at the right. Above the line: time by part. Below: tokens of prompts (plain) and of replies (striped).";
  const { canvas, element } = readoutCanvas("Time and tokens of the last steps", hint, (x) => {
    const step = steps[Math.floor(x * NUM_STEPS) - (NUM_STEPS - steps.length)];
    if (!step) return null;
    const parts = STEP_PARTS.map(([name]) => `${name} ${seconds(step[name])}`).join(", ");
    return `Step ${count(step.n)} at ${clock(step.t)}: ${parts}; ${count(step.samples)} samples, ${count(step.prompt_tokens)} prompt and ` +
      `${count(step.reply_tokens)} reply tokens${step.captured ? ", captured" : ""}`;
  });

  function draw(more) {
    const last = steps.at(-1)?.n ?? -1;
    if (more.length > 0 && more.at(-1).n < last) steps = [];
    steps = [...steps, ...more.filter((step) => step.n > (steps.at(-1)?.n ?? -1))].slice(-NUM_STEPS);
    canvas.dataset.steps = steps.at(-1)?.n ?? 0;
    if (canvas.clientWidth === 0) return;
    const { context, width } = prepare(canvas, 130);
    const timeFills = fills(context, STEP_PARTS);
    const tokenFills = [cssColor("--computed-bar"), patterned(context, cssColor("--memory"), "slash")];
    const slowest = Math.max(1e-6, ...steps.map((step) => STEP_PARTS.reduce((sum, [name]) => sum + step[name], 0)));
    const largest = Math.max(1, ...steps.map((step) => step.prompt_tokens + step.reply_tokens));
    const wide = width / NUM_STEPS;
    const first = NUM_STEPS - steps.length;
    steps.forEach((step, i) => {
      const x = (first + i) * wide;
      let y = 80;
      STEP_PARTS.forEach(([name], k) => {
        const tall = (step[name] / slowest) * 76;
        context.fillStyle = timeFills[k];
        context.fillRect(x, y - tall, Math.max(1, wide - 0.5), tall);
        y -= tall;
      });
      let below = 84;
      [step.prompt_tokens, step.reply_tokens].forEach((tokens, k) => {
        const tall = (Math.sqrt(tokens) / Math.sqrt(largest)) * 42;
        context.fillStyle = tokenFills[k];
        context.fillRect(x, below, Math.max(1, wide - 0.5), tall);
        below += tall;
      });
    });
    context.fillStyle = cssColor("--dim");
    context.fillRect(0, 81, width, 1);
    note(context, `longest ${seconds(slowest)}`, 11);
    note(context, `most ${count(largest)} tokens`, 127);
  }

  const names = h("ul", { class: "legend" }, STEP_PARTS.map(([name, color, pattern]) =>
    h("li", null, swatch(`${color.slice(2)} pattern-${pattern ?? "plain"}`), name)));
  return { element: h("div", null, element, names), draw };
}
