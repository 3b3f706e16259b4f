// One request: why not more was cached first, then everything else that its record has.

import { getRecord } from "./api.js";
import { h, put, table } from "./dom.js";
import { bytes, clock, count, seconds } from "./format.js";
import { gantt } from "./gantt.js";
import { bySource, legend, markLegend, promptBar } from "./sources.js";
import { tokenView } from "./tokens.js";

const RETRY_MS = 700;

export function recordView(id) {
  const element = h("div", { class: "record" });
  const back = h("p", null, h("a", { href: "#requests" }, "← All requests"));
  load();

  async function load() {
    try {
      const record = await getRecord(id);
      put(element, back, heading(record), record.prompts.map((prompt, i) => section(record, prompt, i)), raw(record));
      if (record.outcome === "running" || record.prompts.includes(null)) later();
    } catch (error) {
      const text = error.status === 404 ? `No request ${id}, or another key made it.` : error.message;
      put(element, back, h("h1", null, "Request"), h("p", { class: "error", id: "no-record" }, text));
    }
  }

  function later() {
    setTimeout(() => element.isConnected && load(), RETRY_MS);
  }

  return element;
}

function heading(record) {
  return [
    h("h1", { class: "id" }, record.id),
    h("p", { class: "numbers" }, h("span", null, clock(record.created)), h("span", null, record.path), h("span", null, record.model),
      h("span", null, record.outcome), h("span", { class: "dim" }, `x-request-id ${record.request_id}`))];
}

function section(record, prompt, number) {
  if (prompt === null) return h("p", { class: "empty" }, "This prompt is still running.");
  return h("section", { class: "prompt" },
    record.prompts.length > 1 && h("h2", null, `Prompt ${number + 1}`),
    why(prompt), numbers(prompt), spans(prompt), breakpoints(prompt), groups(prompt), evicted(prompt), store(prompt), events(prompt), transfer(prompt),
    tokens(record, number, prompt));
}

function why(prompt) {
  const sentences = prompt.why.map(({ text }) => h("li", null, text));
  return [h("h2", null, "Why not more?"),
    sentences.length > 0 ? h("ol", { class: "why-list" }, sentences) : h("p", { class: "why-list" }, "Everything that can be cached was.")];
}

function numbers(prompt) {
  const { metrics } = prompt;
  const facts = [
    ["prompt tokens", count(prompt.prompt_tokens)], ["cached", count(prompt.cached_tokens)], ["reply tokens", count(prompt.reply_tokens)],
    ["queue", seconds(metrics.queue_s)], ["first token", seconds(metrics.ttft_s)], ["each further token", seconds(metrics.per_token_s)],
    ["total", seconds(metrics.total_s)], ["preemptions", count(metrics.preemptions)], ["finished by", prompt.finish_reason]];
  return h("dl", { class: "facts-grid" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

function spans(prompt) {
  const { lookup } = prompt;
  const kinds = [prompt.breakpoints.length > 0 && "breakpoint", lookup?.checkpoint && "checkpoint", lookup && lookup.matched_tokens > lookup.position && "matched",
    lookup?.evicted.length > 0 && "evicted"];
  return [h("h2", null, "Where the prompt came from"), promptBar(prompt, lookup),
    h("p", { class: "axis" }, h("span", null, "0"), h("span", null, count(prompt.prompt_tokens))),
    legend(bySource(prompt.spans)), markLegend(kinds.filter(Boolean))];
}

const FATES = { kept: "kept", cached: "cached before", too_early: "inside the first block", no_room: "no room in memory", not_reached: "not reached" };

function breakpoints(prompt) {
  if (prompt.kept.length === 0) return null;
  const columns = [["at token", "num"], ["kept at", "num"], ["outcome", "wide"], ["bytes", "num"]];
  return [h("h2", null, "Breakpoints"), prompt.warnings.map((text) => h("p", { class: "bad" }, text)),
    table("Breakpoints", columns, prompt.kept.map((one) => [
      count(one.position), count(one.kept_at), FATES[one.outcome] ?? one.outcome, one.bytes > 0 ? bytes(one.bytes) : "–"]))];
}

function runsBar(group, total) {
  const place = (start, end) => ({ left: `${(100 * start) / total}%`, width: `${(100 * Math.max(0, end - start)) / total}%` });
  return h("span", { class: "bar thin", role: "img", "aria-label": `${group.name} supplies ${group.supplies} tokens` },
    group.runs.map(([start, end]) => h("span", { class: "segment group-run", title: `tokens ${count(start)} to ${count(end)}`, style: place(start, end) })),
    group.positions.map((p) => h("span", { class: "mark mark-state", title: `state at ${count(p)}`, style: { left: `${(100 * p) / total}%` } })));
}

function groups(prompt) {
  const { lookup } = prompt;
  if (lookup === null) return h("p", { class: "dim" }, "The cache was not asked for this prompt.");
  const columns = [["group", ""], ["kind", "wide"], ["alone supplies", "num"], ["states", "num wide"], ["has", "bar-cell"]];
  return [h("h2", null, "What each group had in memory"),
    h("p", null, `All groups together supply ${count(lookup.position)} tokens; the cached text matches ${count(Math.max(lookup.matched_tokens, lookup.position))}; `,
      `at most ${count(lookup.limit)} can be supplied. Blocks have ${count(lookup.block_tokens)} tokens.`),
    table("Groups", columns, lookup.groups.map((group) => [
      group.name, group.kind, count(group.supplies), group.num_positions > 0 ? count(group.num_positions) : "–", runsBar(group, Math.max(1, prompt.prompt_tokens))]))];
}

function evicted(prompt) {
  const gone = prompt.lookup?.evicted ?? [];
  if (gone.length === 0) return null;
  const columns = [["up to token", "num"], ["ago", "num"], ["requests ago", "num"]];
  return [h("h2", null, "Evicted before"), table("Evicted before", columns, gone.map((entry) => [
    count(entry.position), seconds(entry.seconds_ago), count(entry.requests_ago)]))];
}

function store({ store: asked }) {
  if (asked === null) return null;
  const facts = [["outcome", asked.outcome], ["found up to", count(asked.found)], ["loaded up to", count(asked.loaded)],
    ["bytes", bytes(asked.bytes)], ["time", seconds(asked.seconds)], ["mode", asked.mode ?? "–"]];
  return [h("h2", null, "Store"), h("dl", { class: "facts-grid" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
    asked.failure && h("p", { class: "error" }, asked.failure)];
}

function events(prompt) {
  const total = Math.max(1e-9, prompt.metrics.total_s ?? 0, ...prompt.events.map(({ at, seconds: long }) => at + (long ?? 0)));
  const lines = prompt.events.map(({ at, what, start, end, seconds: long }) => ({
    label: start === null || end === null ? what : `${what} ${count(start)}–${count(end)}`, parts: [{ start: at, end: at + (long ?? 0), kind: "event" }],
    told: `${seconds(at)}${long ? `, for ${seconds(long)}` : ""}`,
  }));
  return [h("h2", null, "Events"), gantt("Events", lines, 0, total)];
}

function transfer({ transfer: moved }) {
  if (moved === null || (moved.rows.length === 0 && moved.layers.length === 0)) return null;
  const all = [...moved.rows, ...moved.layers];
  const from = Math.min(...all.map(({ start }) => start));
  const to = Math.max(...all.map(({ end }) => end));
  const rows = moved.rows.map((row) => ({
    label: `${row.group} ${row.first_layer}${row.last_layer === row.first_layer ? "" : `–${row.last_layer}`}`,
    parts: [{ start: row.start, end: row.end, kind: "loaded" }], told: `row, ${bytes(row.bytes)}, ${seconds(row.end - row.start)}`,
    first: row.first_layer, order: 0,
  }));
  const layers = moved.layers.map((layer) => ({
    label: `layer ${layer.layer}`, first: layer.layer, order: 1,
    parts: [{ start: layer.start - layer.waited, end: layer.start, kind: "waited" }, { start: layer.start, end: layer.end, kind: "layer" }],
    told: `computes ${seconds(layer.end - layer.start)}${layer.waited > 0 ? `, waited ${seconds(layer.waited)}` : ""}`,
  }));
  const lines = [...rows, ...layers].sort((a, b) => a.first - b.first || a.order - b.order);
  return [h("h2", null, "Rows and layers"),
    h("ul", { class: "legend" }, [["loaded", "row is loaded"], ["waited", "layer waits for its row"], ["layer", "layer computes"]].map(([kind, label]) =>
      h("li", null, h("span", { class: `swatch part-${kind}` }), label))),
    gantt("Rows and layers", lines, from, to)];
}

function tokens(record, number, prompt) {
  const details = h("details", null, h("summary", null, "Prompt tokens"));
  details.addEventListener("toggle", () => details.append(tokenView(record.id, number, prompt)), { once: true });
  return details;
}

function raw(record) {
  return h("details", { class: "raw" }, h("summary", null, "Record as JSON"), h("pre", { tabindex: "0" }, JSON.stringify(record, null, 1)));
}
