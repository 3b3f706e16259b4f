// The frame of the page: tabs, the key, the state of the connection.

import { ApiError, getKey, setKey, signals, whoami } from "./api.js";
import { chatView } from "./chat.js";
import { h, put } from "./dom.js";
import { memoryView } from "./memory.js";
import { prefixesView } from "./prefixes.js";
import { requestsView } from "./requests.js";

const VIEWS = { chat: chatView, memory: memoryView, prefixes: prefixesView, requests: requestsView };
const RETRY_MS = 2000;

const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
const connection = document.getElementById("connection");
const keyButton = document.getElementById("key");

/** What views know of the caller: {is_operator, key_needed, key_ok, model, version, may_chat}. */
let caller = null;
let views = {};
let shown = null;
let retryTimer = 0;

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return { name: Object.hasOwn(VIEWS, name) ? name : "chat", argument: rest.length > 0 ? decoded(rest.join("/")) : null };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // not made by this page
  }
}

/** Chats need no key where only the operator has one. */
const needsKey = (name) => caller.key_needed && !caller.key_ok && !(caller.may_chat && name === "chat");

function show() {
  if (caller === null) return;
  const { name, argument } = route();
  for (const link of tabs.children) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown?.hide();
  shown = null;
  say("", "");
  if (needsKey(name)) {
    askForKey(null);
    return;
  }
  views[name] ??= VIEWS[name](caller);
  shown = views[name];
  if (main.firstChild !== shown.element) put(main, shown.element);
  shown.show(argument);
  document.title = `${argument ?? name[0].toUpperCase() + name.slice(1)} · hybridkv`;
}

function say(text, kind) {
  if (connection.textContent !== text) connection.textContent = text;
  connection.className = kind;
}

function askForKey(note) {
  shown?.hide();
  shown = null;
  const input = h("input", { type: "password", id: "key-input", name: "key", autocomplete: "off", required: true, spellcheck: "false" });
  const submit = (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    start(true);
  };
  put(main,
    h("form", { class: "key-form", onsubmit: submit },
      h("h1", null, "This server needs an API key"),
      h("p", null, "Give a key of ", h("code", null, "--api-key"), " or ", h("code", null, "--operator-key"),
        ". This tab keeps it until you close it, and sends it in a header only."),
      note && h("p", { class: "error", role: "alert" }, note),
      h("label", { for: "key-input" }, "API key"),
      h("div", { class: "row" }, input, h("button", { type: "submit", class: "primary" }, "Use this key"))));
  input.focus();
}

function changeKey() {
  if (!getKey()) {
    askForKey(null);
    return;
  }
  setKey(null);
  start(false);
}

async function start(wasGiven) {
  clearTimeout(retryTimer);
  try {
    caller = { ...(await whoami()), may_chat: true };
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      caller = { is_operator: false, key_needed: true, key_ok: false, model: "", may_chat: false };
    } else {
      say("not connected", "bad");
      if (main.childElementCount === 0) put(main, h("p", { class: "empty" }, `The server does not answer: ${error.message}`));
      retryTimer = setTimeout(() => start(wasGiven), RETRY_MS);
      return;
    }
  }
  shown?.hide();
  shown = null;
  views = {};
  document.getElementById("model").textContent = caller.model;
  const role = document.getElementById("role");
  role.textContent = "operator";
  role.hidden = !caller.is_operator;
  keyButton.hidden = !getKey() && !caller.key_needed;
  keyButton.textContent = getKey() ? "Forget key" : "API key";
  show();
  if (caller.key_needed && !caller.key_ok && wasGiven) {
    setKey(null);
    askForKey("The server does not know this key.");
  }
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
keyButton.addEventListener("click", changeKey);
signals.addEventListener("unauthorized", () => {
  if (caller?.key_ok) start(Boolean(getKey()));
});
signals.addEventListener("connected", () => say("live", "good"));
signals.addEventListener("disconnected", () => say("reconnecting…", "bad"));
addEventListener("hashchange", show);
start(false);
