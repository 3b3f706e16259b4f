// Calls of the server. The key lives in sessionStorage and travels in a header only.

import { readEvents } from "./sse.js";

const KEY = "hybridkv.key";
const ROOT = "/v1/hybridkv";
const WHOAMI = `${ROOT}/whoami`;
const FIRST_BACKOFF_MS = 500;
const MAX_BACKOFF_MS = 4000;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** `unauthorized`: a call got 401. `connected`, `disconnected`: state of the live stream. */
export const signals = new EventTarget();

export const getKey = () => sessionStorage.getItem(KEY);

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = getKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", referrerPolicy: "no-referrer" });
  if (response.ok) return response;
  const message = await errorText(response);
  if (response.status === 401 && path !== WHOAMI) signals.dispatchEvent(new Event("unauthorized"));
  throw new ApiError(response.status, message);
}

async function errorText(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.detail ?? text;
  } catch {
    return text || `HTTP status ${response.status}`;
  }
}

const json = async (path, options) => (await call(ROOT + path, options)).json();
const segment = encodeURIComponent;

export const whoami = async () => (await call(WHOAMI)).json();
export const listRequests = () => json("/requests?limit=100");
export const getRecord = (id) => json(`/requests/${segment(id)}`);
export const getTokens = (id, prompt, start, end) =>
  json(`/requests/${segment(id)}/tokens?prompt=${prompt}&start=${start}&end=${end}`);
export const getPrefix = (key) => json(`/prefixes/${segment(key)}`);
export const unpinPrefix = (key) => json(`/prefixes/${segment(key)}/pin`, { method: "DELETE" });
export const dropPrefix = (key) => json(`/prefixes/${segment(key)}`, { method: "DELETE" });
export const pinPrefix = (key, seconds) => json(`/prefixes/${segment(key)}/pin`, asJson({ seconds }));

function asJson(body, signal) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
}

/** Yields the chunks of a streamed chat completion. */
export async function* streamChat(body, signal) {
  const response = await call("/v1/chat/completions", asJson(body, signal));
  for await (const { data } of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.code ?? 500, chunk.error.message);
    yield chunk;
  }
}

/** The record of a finished request: asks again while the server still writes it. */
export async function finishedRecord(id, tries = 12) {
  for (let i = 0; ; i += 1) {
    let record = null;
    try {
      record = await getRecord(id);
    } catch (error) {
      if (error.status !== 404 || i >= 3) throw error;
    }
    if (record && record.outcome !== "running" && record.prompts.every((prompt) => prompt !== null)) return record;
    if (i >= tries) throw new ApiError(404, "the record is not finished yet");
    await pause(100 * (i + 1));
  }
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function deliver(onEvent, event, data) {
  try {
    onEvent(event, JSON.parse(data));
  } catch (error) {
    reportError(error);
  }
}

/** Live events while the page is visible, with reconnects. Returns a function that ends it. */
export function live(topics, onEvent, onRefused) {
  let control = null;
  let timer = 0;
  let backoff = FIRST_BACKOFF_MS;
  let isOver = false;

  async function connect() {
    control = new AbortController();
    const { signal } = control;
    try {
      const response = await call(`${ROOT}/live?topics=${topics.join(",")}`, { signal });
      signals.dispatchEvent(new Event("connected"));
      for await (const { event, data } of readEvents(response.body)) {
        if (signal.aborted) return;
        backoff = FIRST_BACKOFF_MS;
        deliver(onEvent, event, data);
      }
      retry(signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && [401, 403, 404].includes(error.status)) onRefused(error);
      else retry(signal);
    }
  }

  function retry(signal) {
    if (signal.aborted || isOver) return;
    signals.dispatchEvent(new Event("disconnected"));
    timer = setTimeout(connect, backoff);
    backoff = Math.min(2 * backoff, MAX_BACKOFF_MS);
  }

  function stop() {
    clearTimeout(timer);
    control?.abort();
  }

  function onVisibility() {
    stop();
    if (document.visibilityState === "visible") connect();
  }

  document.addEventListener("visibilitychange", onVisibility);
  if (document.visibilityState === "visible") connect();
  return () => {
    isOver = true;
    document.removeEventListener("visibilitychange", onVisibility);
    stop();
  };
}
