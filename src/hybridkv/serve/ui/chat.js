// Chat with the served model; each turn shows where its prompt came from.

import { finishedRecord, streamChat } from "./api.js";
import { h, put } from "./dom.js";
import { count, seconds } from "./format.js";
import { bySource, legend, markLegend, promptBar } from "./sources.js";
import { tokenView } from "./tokens.js";

export function chatView(caller) {
  /** Turns: {role, text, box}. */
  let turns = [];
  let control = null;

  const system = h("textarea", { id: "system", rows: "3", spellcheck: "false", placeholder: "none" });
  const temperature = h("input", { id: "temperature", type: "number", min: "0", max: "2", step: "0.1", value: "0" });
  const maxTokens = h("input", { id: "max-tokens", type: "number", min: "1", step: "1", value: "128" });
  const input = h("textarea", { id: "message", rows: "2", "aria-label": "Message", placeholder: `Message to ${caller.model}` });
  const send = h("button", { type: "submit", class: "primary", id: "send" }, "Send");
  const stop = h("button", { type: "button", id: "stop", disabled: true, onclick: () => control?.abort() }, "Stop");
  const again = h("button", { type: "button", id: "regenerate", disabled: true, onclick: regenerate }, "Regenerate");
  const fresh = h("button", { type: "button", id: "new", onclick: restart }, "New conversation");
  const hint = h("p", { class: "empty" }, "Send a message. Below each reply you see which prompt tokens were cached, and why not more were.");
  const log = h("div", { class: "log", id: "log" }, hint);
  const status = h("p", { class: "visually-hidden", role: "status" });

  function addTurn(role, text) {
    const body = h("div", { class: "text" }, text);
    const facts = h("div", { class: "facts" });
    const turn = { role, text, body, facts, box: h("article", { class: `turn ${role}` }, h("h2", null, role), body, facts) };
    hint.remove();
    turns.push(turn);
    log.append(turn.box);
    scrollTo(0, document.documentElement.scrollHeight);
    return turn;
  }

  function setBusy(isBusy) {
    send.disabled = isBusy;
    stop.disabled = !isBusy;
    again.disabled = isBusy || turns.length === 0;
  }

  function messages() {
    const said = turns.map(({ role, text }) => ({ role, content: text }));
    return system.value ? [{ role: "system", content: system.value }, ...said] : said;
  }

  async function reply() {
    const body = {
      model: caller.model, messages: messages(), stream: true, stream_options: { include_usage: true },
      temperature: Number(temperature.value), max_tokens: Number(maxTokens.value),
    };
    for (const details of log.querySelectorAll("details[open]")) details.open = false;
    const turn = addTurn("assistant", "");
    turn.body.classList.add("running");
    control = new AbortController();
    setBusy(true);
    const seen = { id: null, usage: null, ttft: null, finish: null, began: performance.now() };
    try {
      for await (const chunk of streamChat(body, control.signal)) take(turn, chunk, seen);
    } catch (error) {
      seen.finish = control.signal.aborted ? "stopped" : "error";
      if (seen.finish === "error") turn.body.append(h("p", { class: "error", role: "alert" }, error.message));
    }
    turn.body.classList.remove("running");
    status.textContent = `Reply: ${turn.text}`;
    control = null;
    setBusy(false);
    const follows = isAtEnd();
    showNumbers(turn, seen);
    if (seen.id !== null) await showRecord(turn, seen.id);
    if (follows) turn.facts.querySelector(".why")?.scrollIntoView({ block: "nearest" });
  }

  /** Records are for callers that the server knows. */
  async function showRecord(turn, id) {
    try {
      if (!caller.key_ok && caller.key_needed) throw new Error("give a key of this server to see records");
      addRecord(turn, await finishedRecord(id));
    } catch (error) {
      turn.facts.append(h("p", { class: "dim" }, `No record of this request: ${error.message}`));
    }
  }

  function take(turn, chunk, seen) {
    seen.id ??= chunk.id;
    if (chunk.usage) seen.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    seen.finish = choice.finish_reason ?? seen.finish;
    const text = choice.delta.content;
    if (!text) return;
    seen.ttft ??= (performance.now() - seen.began) / 1000;
    const follows = isAtEnd();
    turn.text += text;
    turn.body.append(text);
    if (follows) scrollTo(0, document.documentElement.scrollHeight);
  }

  async function submit(event) {
    event.preventDefault();
    const text = input.value;
    if (!text.trim() || control !== null) return;
    input.value = "";
    addTurn("user", text);
    await reply();
  }

  async function regenerate() {
    if (turns.length === 0 || control !== null) return;
    if (turns.at(-1).role === "assistant") turns.pop().box.remove();
    await reply();
  }

  function restart() {
    control?.abort();
    turns = [];
    put(log, hint);
    setBusy(false);
    again.disabled = true;
    input.focus();
  }

  const form = h("form", { class: "composer", onsubmit: submit }, input,
    h("div", { class: "row" }, send, stop, again, fresh, h("span", { class: "dim grow" }, "Enter sends, Shift+Enter breaks the line")));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  const settings = h("aside", { class: "settings", "aria-label": "Settings" },
    h("label", { for: "system" }, "System prompt"), system,
    h("label", { for: "temperature" }, "Temperature"), temperature,
    h("label", { for: "max-tokens" }, "Max tokens"), maxTokens);
  const element = h("div", { class: "chat" }, h("h1", { class: "visually-hidden" }, "Chat"), settings,
    h("section", { class: "conversation" }, log, form, status));
  return { element, show() {}, hide() {} };
}

const isAtEnd = () => innerHeight + scrollY >= document.documentElement.scrollHeight - 60;

function showNumbers(turn, seen) {
  const numbers = [];
  if (seen.usage) {
    const cached = seen.usage.prompt_tokens_details?.cached_tokens ?? 0;
    numbers.push(h("span", { class: "cached" }, h("b", null, count(cached)), ` of ${count(seen.usage.prompt_tokens)} prompt tokens cached`));
    numbers.push(h("span", null, h("b", null, count(seen.usage.completion_tokens)), " reply tokens"));
  }
  if (seen.ttft !== null) numbers.push(h("span", null, "first token after ", h("b", null, seconds(seen.ttft))));
  if (seen.finish) numbers.push(h("span", { class: "dim" }, `ended by ${seen.finish}`));
  put(turn.facts, h("p", { class: "numbers" }, numbers));
}

function addRecord(turn, record) {
  const prompt = record.prompts[0];
  if (!prompt) return;
  const sums = bySource(prompt.spans);
  const why = prompt.why[0]?.text ?? "Everything that can be cached was.";
  turn.facts.append(
    promptBar(prompt), h("div", { class: "legends" }, legend(sums), prompt.breakpoints.length > 0 && markLegend(["breakpoint"])),
    h("p", { class: "why" }, h("b", null, "Why not more? "), h("span", { class: "why-text" }, why), " ",
      h("a", { href: `#requests/${encodeURIComponent(record.id)}` }, "Whole record")),
    tokenFold(record.id, prompt));
}

function tokenFold(id, prompt) {
  const details = h("details", { open: true }, h("summary", null, "Prompt tokens"), tokenView(id, 0, prompt));
  return details;
}
