"use strict";
// Requests to this server: the key, errors in words, streams, and the same call as a curl command.

const CHAT_PATH = "/v1/chat/completions";
// The API key lives here and nowhere else; a reload forgets it.
let apiKey = "";

function requestHeaders(more = {}) {
  // Headers are bytes: a key beyond ASCII goes as UTF-8, as it would from curl.
  const bytes = String.fromCharCode(...new TextEncoder().encode(apiKey));
  return { ...more, ...(apiKey ? { Authorization: "Bearer " + bytes } : {}) };
}

// What went wrong, in parts that can be shown: a title, a message, and where it is.
class ServerError extends Error {
  constructor(message, { status = null, type = null, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, type, param, code, retryAfter });
  }

  get title() {
    return [this.status, this.type].filter((part) => part !== null).join(" ") || "The request failed";
  }

  get where() {
    const parts = [];
    if (this.param) parts.push("field: " + this.param);
    if (this.code) parts.push("code: " + this.code);
    if (this.retryAfter) parts.push("try again in " + this.retryAfter + " s");
    return parts.join(" · ");
  }
}

async function errorOf(response) {
  const text = await response.text();
  const retryAfter = response.headers.get("Retry-After");
  try {
    const { message, type, param, code } = JSON.parse(text).error;
    return new ServerError(message, { status: response.status, type, param, code, retryAfter });
  } catch {
    const message = text.slice(0, 500) || response.statusText || "the server gave no reason";
    return new ServerError(message, { status: response.status, retryAfter });
  }
}

// `fetch` of this server; throws ServerError for an answer that is none, or where nobody answers.
async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: requestHeaders(options.headers), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached at " + location.origin + ".", { type: "no connection" });
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

// Yields the JSON of each event of a stream; an event may come in any number of pieces.
async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection broke inside the answer.", { type: "no connection" });
      }
      if (part.done) throw new ServerError("The connection ended before the answer did.", { type: "no connection" });
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const value = JSON.parse(data);
        if (value.error) throw new ServerError(value.error.message, value.error);
        yield value;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function shellQuoted(text) {
  return "'" + text.replaceAll("'", "'\\''") + "'";
}

// The call as a command; a key is named, not written into it.
function curlCommand(body) {
  const lines = ["curl -N " + shellQuoted(location.origin + CHAT_PATH), "  -H 'Content-Type: application/json'"];
  if (apiKey) lines.push('  -H "Authorization: Bearer $API_KEY"');
  lines.push("  -d " + shellQuoted(JSON.stringify(body, null, 2)));
  return lines.join(" \\\n");
}
