// The arena as a map: one cell for a slab, or for several of a large arena.

import { live } from "./api.js";
import { h, put, table } from "./dom.js";
import { bytes, count, percent, seconds, worth } from "./format.js";
import { MemoryMap } from "./memory_map.js";
import { groupClass } from "./paint.js";

const PARTS = [
  ["used", "used"],
  ["unused", "unused pages of slabs in use"],
  ["padding", "padding"],
  ["pinned", "pinned"],
  ["free", "free slabs"],
];

export function memoryView() {
  const map = new MemoryMap(readout);
  const told = h("p", { class: "readout", role: "status", "aria-live": "polite" }, "Point at a cell, or use the arrow keys in the map.");
  const head = h("p", { class: "numbers" });
  const groups = h("div");
  const sizes = h("ul", { class: "legend sizes" });
  const evictions = h("div");
  const note = h("p", { class: "empty" }, "Waiting for the first picture of the arena…");
  const body = h("div", { hidden: true },
    head,
    h("ul", { class: "legend" },
      h("li", null, h("span", { class: "swatch cell-free" }), "free"),
      h("li", null, h("span", { class: "swatch cell-null" }, "×"), "null slab: never used"),
      h("li", null, h("span", { class: "swatch cell-pinned" }), "pinned"),
      h("li", { class: "dim" }, "The height of a cell's fill is the share of its pages in use.")),
    map.canvas, told, groups, sizes,
    h("h2", null, "Eviction takes next"), evictions);
  const element = h("div", { class: "memory" }, h("h1", null, "Memory"), note, body);
  let end = null;

  function readout(text) {
    told.textContent = text;
  }

  function onEvent(event, data) {
    if (event !== "memory") return;
    note.hidden = true;
    body.hidden = false;
    element.dataset.time = data.time;
    const total = data.bytes.total;
    put(head, h("span", null, h("b", null, bytes(total)), ` in ${count(data.num_slabs)} slabs of ${bytes(data.slab_bytes)}`),
      data.slabs_per_cell > 1 && h("span", null, `a cell is ${count(data.slabs_per_cell)} slabs`),
      h("span", null, h("b", null, count(data.running)), " running"), h("span", null, h("b", null, count(data.waiting)), " waiting"));
    map.draw(data);
    put(sizes, PARTS.map(([name, label]) =>
      h("li", null, `${label} `, h("b", null, bytes(data.bytes[name])), h("span", { class: "dim" }, ` ${percent(data.bytes[name], total)}`))));
    put(groups, groupTable(data));
    put(evictions, evictionTable(data.next_evictions));
  }

  function show() {
    end = live(["memory"], onEvent, (error) => put(note, error.message));
  }

  function hide() {
    end?.();
    end = null;
  }

  return { element, show, hide };
}

function groupTable({ groups, slab_bytes: slabBytes }) {
  const columns = [["group", ""], ["kind", ""], ["slabs", "num"], ["pages used", "num"], ["of", "num"], ["page", "num wide"], ["in slabs", "num"], ["padding", "num wide"]];
  return table("Groups", columns, groups.map((group, i) => [
    [h("span", { class: `swatch ${groupClass(i)}` }), group.name], group.kind.replaceAll("_", " "), count(group.slabs), count(group.used_pages),
    count(group.slabs * group.pages_per_slab), bytes(group.page_bytes), bytes(group.slabs * slabBytes), bytes(group.padding_bytes)]));
}

function evictionTable(entries) {
  if (entries.length === 0) return h("p", { class: "dim" }, "Nothing is evictable now.");
  const columns = [["what", ""], ["at token", "num"], ["tokens", "num wide"], ["frees", "num"], ["idle", "num"], ["hits", "num wide"], ["worth", "num wide"]];
  return table("What eviction takes next, first one first", columns, entries.map((entry) => [
    entry.kind ? `${entry.what} (${entry.kind})` : entry.what, count(entry.position), count(entry.tokens), bytes(entry.bytes),
    seconds(entry.idle_s), count(entry.hits), worth(entry.worth)]));
}
