// Lines of a timeline: a label, parts on one scale, and the numbers as text.

import { h } from "./dom.js";
import { seconds } from "./format.js";

const MAX_LINES = 400;

/** `lines`: {label, told, parts: [{start, end, kind}]}, in seconds between `from` and `to`. */
export function gantt(caption, lines, from, to) {
  const span = Math.max(1e-9, to - from);
  const place = ({ start, end }) => ({ left: `${(100 * (start - from)) / span}%`, width: `${(100 * (end - start)) / span}%` });
  const shown = lines.slice(0, MAX_LINES);
  return h("div", { class: "gantt", role: "table", "aria-label": caption },
    shown.map(({ label, told, parts }) => h("div", { class: "line", role: "row" },
      h("span", { class: "line-label", role: "rowheader" }, label),
      h("span", { class: "line-track", role: "cell", "aria-hidden": "true" }, parts.map((part) =>
        h("span", { class: `part part-${part.kind}`, style: place(part) }))),
      h("span", { class: "line-told", role: "cell" }, told))),
    h("p", { class: "axis" }, h("span", null, seconds(from)), h("span", null, seconds(to)),
      lines.length > shown.length && h("span", null, `${lines.length - shown.length} more lines`)));
}
