// Draws the cells of the arena on a canvas, and tells what the one under the pointer or the cursor is.

import { cssColor, h } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { groupFill, prepare } from "./paint.js";

const FREE = -1;
const MIN_CELL = 8;
const MAX_CELL = 32;
const AREA = 420000;

const STEPS = { ArrowLeft: () => -1, ArrowRight: () => 1, ArrowUp: (map) => -map.columns, ArrowDown: (map) => map.columns };

export class MemoryMap {
  constructor(onReadout) {
    this.onReadout = onReadout;
    this.data = null;
    this.cursor = null;
    this.columns = 1;
    this.size = MAX_CELL;
    this.canvas = h("canvas", {
      class: "map", tabindex: "0", role: "application", "aria-label": "Map of the arena: arrow keys move from cell to cell",
      onpointermove: (event) => this.point(event), onkeydown: (event) => this.press(event), onpointerleave: () => this.move(null),
    });
    new ResizeObserver(() => this.paint()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  draw(data) {
    this.data = data;
    this.canvas.dataset.cells = data.owners.length;
    this.paint();
    if (this.cursor !== null) this.onReadout(this.describe(this.cursor));
  }

  paint() {
    if (this.data === null || this.canvas.clientWidth === 0) return;
    const { owners } = this.data;
    const width = this.canvas.clientWidth;
    const even = Math.floor(Math.sqrt(Math.min(AREA, width * 420) / Math.max(1, owners.length)));
    this.size = Math.max(MIN_CELL, Math.min(MAX_CELL, even));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const { context } = prepare(this.canvas, Math.ceil(owners.length / this.columns) * this.size + 1);
    this.paintCells(context);
    if (this.cursor !== null) this.outline(context, this.cursor);
  }

  paintCells(context) {
    const { owners, used, pinned, groups } = this.data;
    const fills = groups.map((_, i) => groupFill(context, i));
    const pale = groups.map((_, i) => cssColor(`--hue-${i % 6}`));
    const [line, ink, pin] = [cssColor("--line"), cssColor("--dim"), cssColor("--text")];
    const inner = this.size - 2;
    owners.forEach((owner, i) => {
      const [x, y] = this.place(i);
      if (owner >= 0) {
        const height = Math.max(1, Math.round((inner * used[i]) / 255));
        context.globalAlpha = 0.22;
        context.fillStyle = pale[owner];
        context.fillRect(x, y, inner, inner);
        context.globalAlpha = 1;
        context.fillStyle = fills[owner];
        context.fillRect(x, y + inner - height, inner, height);
      } else {
        context.strokeStyle = owner === FREE ? line : ink;
        context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
        if (owner !== FREE) cross(context, x, y, inner);
      }
    });
    context.fillStyle = pin;
    for (const i of pinned) corner(context, ...this.place(i), Math.max(4, inner / 2));
  }

  place(i) {
    return [(i % this.columns) * this.size + 1, Math.floor(i / this.columns) * this.size + 1];
  }

  outline(context, i) {
    const [x, y] = this.place(i);
    context.strokeStyle = cssColor("--text");
    context.lineWidth = 2;
    context.strokeRect(x - 0.5, y - 0.5, this.size - 1, this.size - 1);
    context.lineWidth = 1;
  }

  point(event) {
    if (this.data === null) return;
    const column = Math.floor(event.offsetX / this.size);
    const cell = Math.floor(event.offsetY / this.size) * this.columns + column;
    this.move(column < this.columns && cell >= 0 && cell < this.data.owners.length ? cell : null);
  }

  press(event) {
    if (this.data === null) return;
    const last = this.data.owners.length - 1;
    let next = null;
    if (event.key in STEPS) next = this.cursor === null ? 0 : this.cursor + STEPS[event.key](this);
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    if (next === null) return;
    event.preventDefault();
    if (next >= 0 && next <= last) this.move(next);
  }

  move(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    if (cell !== null) this.onReadout(this.describe(cell));
    this.paint();
  }

  describe(i) {
    const { owners, used, pinned, groups, slab_bytes: slabBytes, slabs_per_cell: each } = this.data;
    const slabs = each > 1 ? `Slabs ${count(i * each)} to ${count((i + 1) * each)}` : `Slab ${count(i)}`;
    if (owners[i] === FREE) return `${slabs}: free, ${bytes(slabBytes * each)}`;
    if (owners[i] < FREE) return `${slabs}: the null slab, which empty table entries name`;
    const { name, kind, page_bytes: pageBytes, pages_per_slab: pages } = groups[owners[i]];
    const pin = pinned.includes(i) ? ", pinned" : "";
    return `${slabs}: ${name} (${kind.replaceAll("_", " ")}), ${percent(used[i], 255)} of ${count(pages * each)} pages of ${bytes(pageBytes)} in use${pin}`;
  }
}

function cross(context, x, y, size) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + size, y + size);
  context.moveTo(x + size, y);
  context.lineTo(x, y + size);
  context.stroke();
}

function corner(context, x, y, size) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + size, y);
  context.lineTo(x, y + size);
  context.fill();
}
