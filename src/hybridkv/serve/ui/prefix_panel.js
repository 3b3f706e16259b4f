// One node of the tree: its text, its checkpoints, and what the operator can do with it.

import { dropPrefix, getPrefix, pinPrefix, unpinPrefix } from "./api.js";
import { h, put, table } from "./dom.js";
import { count, seconds, worth } from "./format.js";

const PIN_TIMES = [[600, "10 minutes"], [3600, "1 hour"], [86400, "1 day"], [604800, "7 days"]];

export function prefixPanel() {
  const element = h("aside", { class: "panel", "aria-label": "Selected prefix" },
    h("p", { class: "empty" }, "Select a node: click it, or press Enter."));
  let node = null;
  const facts = h("div");
  const text = h("pre", { class: "prefix-text", tabindex: "0" });
  const outcome = h("p", { role: "status", class: "outcome" });
  const actions = h("div", { class: "actions" });

  async function open(chosen) {
    node = chosen;
    outcome.textContent = "";
    put(text, "…");
    put(element, h("h2", null, "Node"), facts, actions, outcome, h("h3", null, "Text"), text);
    drawFacts();
    drawActions();
    try {
      const body = await getPrefix(chosen.key);
      if (node?.key !== chosen.key) return;
      put(text, h("span", { class: "dim" }, body.is_cut ? "… " : body.before), body.text);
    } catch (error) {
      put(text, error.message);
    }
  }

  /** A newer picture of the same node, or null if the cache no longer has it. */
  function update(newer) {
    if (node === null) return;
    if (newer === null) {
      put(actions, h("p", { class: "dim" }, "The cache no longer has this node."));
      return;
    }
    const wasPinned = node.pinned;
    node = newer;
    drawFacts();
    if (wasPinned !== node.pinned) drawActions();
  }

  function drawFacts() {
    const columns = [["at token", "num"], ["kind", ""], ["hits", "num"], ["idle", "num"], ["worth", "num"]];
    put(facts,
      h("p", { class: "numbers" }, h("span", null, h("b", null, count(node.end - node.start)), ` tokens, ${count(node.start)} to ${count(node.end)}`),
        h("span", null, h("b", null, count(node.leases)), " in use"), h("span", null, `idle ${seconds(node.idle_s)}`),
        h("span", { id: "pin-state" }, node.pinned ? "pinned" : "not pinned")),
      node.checkpoints.length > 0 && table("Checkpoints", columns, node.checkpoints.map((checkpoint) => [
        count(checkpoint.position), checkpoint.kind, count(checkpoint.hits), seconds(checkpoint.idle_s), worth(checkpoint.worth)])));
  }

  async function act(call, tell) {
    try {
      outcome.textContent = tell(await call());
      outcome.classList.remove("error");
    } catch (error) {
      outcome.textContent = error.message;
      outcome.classList.add("error");
    }
  }

  function drawActions() {
    const time = h("select", { id: "pin-time", "aria-label": "Pin for" }, PIN_TIMES.map(([value, label]) => h("option", { value }, label)));
    time.value = "3600";
    const pin = () => act(() => pinPrefix(node.key, Number(time.value)), (body) => `Pinned ${count(body.tokens)} tokens for ${seconds(body.expires_in_s)}.`);
    const unpin = () => act(() => unpinPrefix(node.key), () => "Not pinned any more.");
    put(actions, h("div", { class: "row" },
      h("button", { type: "button", id: "pin", onclick: pin }, node.pinned ? "Pin longer" : "Pin"), time,
      h("button", { type: "button", id: "unpin", disabled: !node.pinned, onclick: unpin }, "Unpin"),
      h("button", { type: "button", id: "drop", class: "danger", onclick: confirmDrop }, "Drop…")));
  }

  function confirmDrop() {
    const key = node.key;
    const drop = () => {
      drawActions();
      act(() => dropPrefix(key), (body) => `Dropped ${count(body.dropped_tokens)} tokens.`);
    };
    const sure = h("button", { type: "button", id: "drop-sure", class: "danger", onclick: drop }, "Drop it");
    put(actions, h("div", { class: "confirm", role: "alertdialog", "aria-label": "Drop this prefix?" },
      h("p", null, "Drop this node and all that continue it from memory? The next request with this prefix computes it again."),
      h("div", { class: "row" }, sure, h("button", { type: "button", onclick: drawActions }, "Keep it"))));
    sure.focus();
  }

  return { element, open, update };
}
