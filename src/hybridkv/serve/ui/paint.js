// Canvas helpers: sharp pixels, and fills that differ by pattern as well as by colour.

import { cssColor } from "./dom.js";

/** Sizes a canvas to its box and returns its context, scaled to CSS pixels. */
export function prepare(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.setProperty("height", `${height}px`);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width, height };
}

const LINES = {
  slash: [[0, 6, 6, 0]],
  backslash: [[0, 0, 6, 6]],
  rows: [[0, 3, 6, 3]],
  cross: [[0, 3, 6, 3], [3, 0, 3, 6]],
};

/** A fill of `color`; with the name of a pattern, with lines in the page's colour on top. */
export function patterned(context, color, pattern) {
  if (!pattern) return color;
  const tile = document.createElement("canvas");
  tile.width = 6;
  tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = color;
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = cssColor("--page");
  pen.lineWidth = 1.2;
  for (const [x0, y0, x1, y1] of LINES[pattern]) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

const GROUP_PATTERNS = [null, "slash", "backslash", "rows", "cross"];
const NUM_HUES = 6;

/** Class of the swatch of group `index`: the style sheet has the same colours and patterns. */
export const groupClass = (index) => `hue-${index % NUM_HUES} pattern-${GROUP_PATTERNS[index % GROUP_PATTERNS.length] ?? "plain"}`;

export const groupFill = (context, index) =>
  patterned(context, cssColor(`--hue-${index % NUM_HUES}`), GROUP_PATTERNS[index % GROUP_PATTERNS.length]);
