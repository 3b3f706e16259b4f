// Checkpoints as shapes: the kind is the form, the worth is the size.

import { h, s } from "./dom.js";

const PATHS = {
  end: (r) => `M0 ${-r}V${r}M${-r} 0H${r}`,
  branch: (r) => `M0 ${-r}L${r} ${r}L${-r} ${r}Z`,
  breakpoint: (r) => `M0 ${-r}L${r} 0L0 ${r}L${-r} 0Z`,
  parting: (r) => `M0 ${r}L${r} ${-r}L${-r} ${-r}Z`,
  fill: (r) => `M${-r} 0A${r} ${r} 0 1 0 ${r} 0A${r} ${r} 0 1 0 ${-r} 0Z`,
  grid: (r) => `M${-r} ${-r}H${r}V${r}H${-r}Z`,
};

/** A shape around the origin. */
export function checkpointShape(kind, size) {
  const path = PATHS[kind] ?? PATHS.grid;
  return s("path", { class: `checkpoint kind-${kind}`, d: path((kind === "grid" || kind === "fill" ? 0.75 : 1) * size) });
}

export function checkpointLegend() {
  return h("ul", { class: "legend" }, Object.keys(PATHS).map((kind) =>
    h("li", null, s("svg", { width: "16", height: "16", viewBox: "-8 -8 16 16", "aria-hidden": "true" }, checkpointShape(kind, 5)),
      `checkpoint: ${kind}`)), h("li", { class: "dim" }, "A larger shape is worth more to keep."));
}
