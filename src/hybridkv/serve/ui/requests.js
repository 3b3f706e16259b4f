// The list of requests, live; and one of them at #requests/ID.

import { listRequests, live } from "./api.js";
import { hitChart, stepChart } from "./charts.js";
import { h, put } from "./dom.js";
import { clock, count, percent, seconds } from "./format.js";
import { recordView } from "./record.js";
import { missingLabel, sumsBar } from "./sources.js";

const MAX_ROWS = 200;

export function requestsView(caller) {
  const hits = hitChart();
  const steps = stepChart();
  const rows = h("tbody");
  const note = h("p", { class: "empty" }, "No request yet.");
  const list = h("div", { class: "requests" },
    h("h1", null, "Requests"),
    h("p", { class: "dim" }, caller.is_operator ? "All requests, newest first." : "Requests made with your key, newest first."),
    hits.element,
    h("h2", null, "Steps"), steps.element,
    h("h2", null, "Records"), note,
    h("div", { class: "scroll" }, h("table", { class: "records" }, h("thead", null, h("tr", null,
      ["time", "request", "prompt", "tokens by source", "cached", "first token", "why not more"].map((title, i) =>
        h("th", { scope: "col", class: ["", "wide", "num", "bar-cell", "num", "num wide", ""][i] }, title)))), rows)));
  const element = h("div", null);
  let known = new Map();
  let end = null;

  function add(summaries) {
    for (const summary of summaries) known.set(summary.id, summary);
    const sorted = [...known.values()].sort((a, b) => b.created - a.created).slice(0, MAX_ROWS);
    known = new Map(sorted.map((summary) => [summary.id, summary]));
    note.hidden = sorted.length > 0;
    const focused = rows.contains(document.activeElement) ? document.activeElement.hash : null;
    put(rows, sorted.map(row));
    if (focused) [...rows.querySelectorAll("a")].find((link) => link.hash === focused)?.focus();
    hits.draw(sorted);
  }

  function onEvent(event, data) {
    if (event === "requests") add(data.requests);
    if (event === "steps") steps.draw(data.steps);
  }

  function show(id) {
    if (id !== null) {
      put(element, recordView(id));
      return;
    }
    put(element, list);
    hits.draw([...known.values()]);
    steps.draw([]);
    end = live(["requests", "steps"], onEvent, withoutSteps);
  }

  /** A caller that may not watch: the list alone. */
  async function withoutSteps(error) {
    try {
      add((await listRequests()).data);
    } catch {
      put(note, error.message);
    }
  }

  function hide() {
    end?.();
    end = null;
  }

  return { element, show, hide };
}

function row(summary) {
  const link = h("a", { href: `#requests/${encodeURIComponent(summary.id)}`, title: summary.why ?? "" }, clock(summary.created));
  return h("tr", { "data-id": summary.id },
    h("td", null, link), h("td", { class: "wide" }, `${summary.path}${summary.outcome === "completed" ? "" : ` · ${summary.outcome}`}`),
    h("td", { class: "num" }, count(summary.prompt_tokens)),
    h("td", { class: "bar-cell" }, sumsBar(summary.by_source)),
    h("td", { class: "num" }, percent(summary.cached_tokens, summary.prompt_tokens)),
    h("td", { class: "num wide" }, seconds(summary.ttft_s)), h("td", null, missingLabel(summary.missing)));
}
