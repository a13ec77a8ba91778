"use strict";
// The conversation: turns in memory, one answer at a time, streamed from /v1/chat/completions.

const chat = {
  // { role: "user", text, node } or { role: "assistant", answer, view, node }
  turns: [],
  controller: null,
  model: null,
};

const STARTERS = [
  "Explain what a KV cache is in three sentences.",
  "Write a Python function that reverses a linked list.",
  "List three rivers in Europe and where they end.",
];

function showWelcome() {
  const starters = el("div", { className: "starters" }, ...STARTERS.map((text) => button(text, () => sendText(text))));
  $("messages").replaceChildren(
    el("div", { className: "welcome" }, el("h2", {}, "Ask the model something"),
      el("p", {}, "The conversation stays in this tab."), starters),
  );
}

// Follows the end of the conversation unless the reader scrolled away from it.
let isFollowing = true;
function followEnd(isForced = false) {
  if (isForced || isFollowing) $("messages").scrollTop = $("messages").scrollHeight;
}

// Text that grows does not scroll by itself: this is the reader, or `followEnd`.
function scrolled() {
  const list = $("messages");
  isFollowing = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
}

function setRunning(controller) {
  chat.controller = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
}

function historyBefore(turn) {
  const turns = turn ? chat.turns.slice(0, chat.turns.indexOf(turn)) : chat.turns;
  return turns.flatMap((each) => (each.role === "user" ? [{ role: "user", content: each.text }] : each.answer.messages()));
}

function addUserTurn(text) {
  if (!chat.turns.length) $("messages").replaceChildren();
  const turn = { role: "user", text };
  const edit = button("Edit", () => editTurn(turn));
  turn.node = el(
    "article", { className: "message user", "aria-label": "You" },
    el("header", {}, el("span", { className: "who" }, "You"), el("div", { className: "actions" }, edit)),
    el("div", { className: "text" }, text),
  );
  chat.turns.push(turn);
  $("messages").append(turn.node);
}

// Forgets a turn and all after it, with what stands below on the page.
function forgetFrom(turn) {
  for (const gone of chat.turns.splice(chat.turns.indexOf(turn))) {
    while (gone.node.nextSibling) gone.node.nextSibling.remove();
    gone.node.remove();
  }
}

function editTurn(turn) {
  if (chat.controller !== null) return;
  forgetFrom(turn);
  if (!chat.turns.length) showWelcome();
  $("input").value = turn.text;
  $("input").focus();
}

function showError(error) {
  const where = error.where ? el("div", { className: "where" }, error.where) : null;
  const retry = button("Try again", () => {
    node.remove();
    askModel();
  });
  const box = el(
    "div", { className: "box" },
    el("div", { className: "what" }, error.title ?? "The request failed"), el("div", {}, error.message), where, retry,
  );
  const node = el("article", { className: "message error", role: "alert" }, box);
  $("messages").append(node);
  followEnd(true);
}

// The body of a request for the conversation so far; null, with the field shown, if a field is wrong.
function checkedBody(messages) {
  try {
    return requestBody(chat.model, messages);
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    openSettings(error.id);
    if ($(error.id + "-error")) {
      $(error.id + "-error").textContent = error.message;
      $(error.id).setAttribute("aria-invalid", "true");
    } else {
      toast(error.message);
    }
    return null;
  }
}

// Whether a request may be sent now; says why not.
function canAsk() {
  if (chat.controller !== null) return false;
  if (chat.model === null) {
    toast("The server has not said which model it serves yet.");
    return false;
  }
  return true;
}

function sendText(text) {
  if (!text || !canAsk()) return;
  const last = chat.turns.at(-1);
  if (last?.role === "assistant" && last.view.waitsForResults) {
    toast("Send the tools’ results first.");
    last.view.cards[0].field.focus();
    return;
  }
  if (checkedBody([]) === null) return;
  $("messages").querySelectorAll(".error").forEach((node) => node.remove());
  // A question that got no answer is asked together with this one.
  addUserTurn(text);
  $("input").value = "";
  askModel();
}

async function askModel() {
  if (!canAsk()) return;
  const body = checkedBody(historyBefore(null));
  if (body === null) return;
  const answer = new Answer(body);
  const view = new AnswerView(answer, { retry: askAgain, continueWithResults });
  const controller = new AbortController();
  const turns = chat.turns;
  setRunning(controller);
  $("messages").append(view.node);
  followEnd(true);
  const failure = await streamAnswer(answer, view, controller);
  view.end();
  setRunning(null);
  if (chat.turns !== turns) return; // a new chat was begun meanwhile
  if (answer.firstMs === null) view.node.remove();
  else turns.push({ role: "assistant", answer, view, node: view.node });
  if (failure) showError(failure);
  else if (answer.firstMs === null) toast("Stopped before the first token");
  else announce("Answer complete: " + answer.stats().map(([label, value]) => label + " " + value).join(", "));
  // Whoever is busy elsewhere on the page keeps the focus.
  if (document.activeElement === document.body) (view.cards.find((card) => card.field)?.field ?? $("input")).focus();
  followEnd();
}

// Reads the answer to its end; returns the error that ended it, if one did.
async function streamAnswer(answer, view, controller) {
  try {
    const response = await call(CHAT_PATH, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Request-ID": newRequestId() },
      body: JSON.stringify(answer.body),
      signal: controller.signal,
    });
    for await (const chunk of serverEvents(response)) {
      answer.take(chunk);
      view.changed(followEnd);
    }
    return null;
  } catch (error) {
    if (controller.signal.aborted) {
      answer.finish = "stopped by you";
      return null;
    }
    answer.finish = "error";
    if (error.status === 401) openKeyForm("The API key is missing or wrong.");
    return error;
  }
}

// Ids of this tab's calls, which the table of requests marks.
const CONSOLE_ID = "ui-" + Math.random().toString(36).slice(2, 8);
let numCalls = 0;
function newRequestId() {
  return CONSOLE_ID + "-" + ++numCalls;
}

function askAgain(view) {
  const turn = chat.turns.find((each) => each.view === view);
  if (chat.controller !== null || !turn) return;
  forgetFrom(turn);
  askModel();
}

function continueWithResults(view) {
  if (!canAsk()) return;
  view.settleCalls();
  askModel();
}

function startChat() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    sendText($("input").value.trim());
  });
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("form").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => chat.controller?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.defaultPrevented && !$("copy-dialog").open) chat.controller?.abort();
  });
  $("new").addEventListener("click", () => {
    chat.controller?.abort();
    chat.turns = [];
    showWelcome();
    $("input").focus();
  });
  $("copy-next").addEventListener("click", () => {
    const draft = $("input").value.trim();
    const body = checkedBody([...historyBefore(null), ...(draft ? [{ role: "user", content: draft }] : [])]);
    if (body !== null) copyText(curlCommand(body), "Command");
  });
  $("messages").addEventListener("scroll", scrolled);
  showWelcome();
}
