// The radix tree of cached prefixes, for the operator.

import { live } from "./api.js";
import { h, put, s } from "./dom.js";
import { count, seconds } from "./format.js";
import { prefixPanel } from "./prefix_panel.js";
import { checkpointLegend, checkpointShape } from "./shapes.js";

const MAX_ROWS = 400;

export function prefixesView(caller) {
  if (!caller.is_operator) return { element: refusal(), show() {}, hide() {} };
  const tree = h("div", { class: "tree", role: "tree", "aria-label": "Cached prefixes", onkeydown: press });
  const note = h("p", { class: "empty" }, "Waiting for the tree…");
  const head = h("p", { class: "numbers" });
  const panel = prefixPanel();
  const element = h("div", { class: "prefixes" }, h("h1", null, "Prefixes"), head, checkpointLegend(), note,
    h("div", { class: "split" }, tree, panel.element));
  const closed = new Set();
  const rows = new Map();
  let nodes = new Map();
  let order = [];
  let selected = null;
  let active = null;
  let end = null;

  function onEvent(event, data) {
    if (event !== "prefixes") return;
    nodes = new Map(data.nodes.map((node) => [node.key, node]));
    note.hidden = nodes.size > 0;
    note.textContent = "The cache holds no prefix. Send a request first.";
    const tokens = data.nodes.reduce((sum, node) => sum + node.end - node.start, 0);
    put(head, h("span", null, h("b", null, count(data.num_nodes)), data.num_nodes === 1 ? " node" : " nodes"), h("span", null, h("b", null, count(tokens)), " tokens"),
      data.is_cut && h("span", null, "only a part is shown"));
    draw();
    if (selected !== null) panel.update(nodes.get(selected) ?? null);
  }

  /** Visible nodes, depth first: [node, depth]. */
  function visible() {
    const children = new Map();
    for (const node of nodes.values()) {
      const parent = nodes.has(node.parent) ? node.parent : null;
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(node);
    }
    const found = [];
    const stack = (children.get(null) ?? []).map((node) => [node, 0]).reverse();
    while (stack.length > 0 && found.length < MAX_ROWS) {
      const [node, depth] = stack.pop();
      const below = children.get(node.key) ?? [];
      found.push([node, depth, below.length]);
      if (!closed.has(node.key)) stack.push(...below.map((child) => [child, depth + 1]).reverse());
    }
    return found;
  }

  function draw() {
    order = visible();
    const total = order.reduce((most, [node]) => Math.max(most, node.end, ...node.checkpoints.map(({ position }) => position)), 1);
    const keys = new Set(order.map(([node]) => node.key));
    for (const key of rows.keys()) if (!keys.has(key)) rows.delete(key);
    if (!keys.has(active)) active = order[0]?.[0].key ?? null;
    const hadFocus = tree.contains(document.activeElement);
    order.forEach(([node, depth, below], i) => {
      if (!rows.has(node.key)) rows.set(node.key, makeRow(node.key));
      const row = rows.get(node.key);
      fillRow(row, node, depth, below, total);
      if (tree.children[i] !== row) tree.insertBefore(row, tree.children[i] ?? null);
    });
    while (tree.children.length > order.length) tree.lastChild.remove();
    if (hadFocus && !tree.contains(document.activeElement)) rows.get(active)?.focus();
  }

  function makeRow(key) {
    return h("div", { role: "treeitem", class: "node", "data-key": key, onclick: (event) => {
      activate(key);
      if (event.target.closest(".twist")) toggle(key);
      else select(key);
    } });
  }

  function fillRow(row, node, depth, below, total) {
    const isOpen = !closed.has(node.key);
    row.setAttribute("aria-level", depth + 1);
    row.setAttribute("aria-selected", node.key === selected);
    row.tabIndex = node.key === active ? 0 : -1;
    if (below > 0) row.setAttribute("aria-expanded", isOpen);
    else row.removeAttribute("aria-expanded");
    row.style.setProperty("--depth", Math.min(depth, 12));
    put(row,
      h("span", { class: "twist", "aria-hidden": "true" }, below === 0 ? "·" : isOpen ? "▾" : "▸"),
      h("span", { class: "head" }, node.head || "(no text)"),
      h("span", { class: "badges" }, node.pinned && h("span", { class: "badge pin" }, "pinned"),
        node.leases > 0 && h("span", { class: "badge" }, `${count(node.leases)} in use`)),
      h("span", { class: "range" }, `${count(node.start)}–${count(node.end)}`),
      nodeBar(node, total));
  }

  function activate(key) {
    active = key;
    for (const [other, row] of rows) row.tabIndex = other === key ? 0 : -1;
    rows.get(key)?.focus();
  }

  function toggle(key) {
    if (!closed.delete(key)) closed.add(key);
    draw();
  }

  function select(key) {
    selected = key;
    for (const [other, row] of rows) row.setAttribute("aria-selected", other === key);
    panel.open(nodes.get(key));
  }

  function press(event) {
    const at = order.findIndex(([node]) => node.key === active);
    if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const [node, , below] = order[at];
    const isOpen = below > 0 && !closed.has(node.key);
    const go = (i) => order[i] && activate(order[i][0].key);
    const actions = {
      ArrowDown: () => go(at + 1),
      ArrowUp: () => go(at - 1),
      Home: () => go(0),
      End: () => go(order.length - 1),
      ArrowRight: () => (isOpen ? go(at + 1) : below > 0 && toggle(node.key)),
      ArrowLeft: () => (isOpen ? toggle(node.key) : nodes.has(node.parent) && activate(node.parent)),
      Enter: () => select(node.key),
      " ": () => select(node.key),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  function show() {
    end = live(["prefixes"], onEvent, (error) => put(element, h("h1", null, "Prefixes"), h("p", { class: "error" }, error.message)));
  }

  function hide() {
    end?.();
    end = null;
  }

  return { element, show, hide };
}

function nodeBar(node, total) {
  const percent = (tokens) => `${(100 * tokens) / total}%`;
  const title = `tokens ${count(node.start)} to ${count(node.end)}, ${count(node.checkpoints.length)} checkpoints, idle ${seconds(node.idle_s)}`;
  const most = Math.max(1e-12, ...node.checkpoints.map((checkpoint) => checkpoint.worth ?? 0));
  return s("svg", { class: "node-bar", role: "img", "aria-label": title, width: "100%", height: "14" },
    s("line", { class: "before", x1: "0", x2: percent(node.start), y1: "7", y2: "7" }),
    s("rect", { class: "own", x: percent(node.start), width: percent(node.end - node.start), y: "4", height: "6" }),
    node.checkpoints.map((checkpoint) => {
      const size = 4 + 3 * Math.sqrt((checkpoint.worth ?? 0) / most);
      return s("svg", { x: percent(checkpoint.position), y: "7", overflow: "visible" }, checkpointShape(checkpoint.kind, size));
    }));
}

function refusal() {
  return h("div", null, h("h1", null, "Prefixes"),
    h("p", { class: "empty", id: "refusal" }, "The text of cached prefixes comes from all callers: only the operator sees it. Start the server with ",
      h("code", null, "--operator-key KEY"), ", and use that key here."));
}
