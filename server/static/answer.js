"use strict";
// One answer of the model: gathered from the events of its stream, and shown as it grows.

// What an answer holds. `calls` are { id, name, arguments, result }, the result null until given.
class Answer {
  constructor(body) {
    this.body = body;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.finish = null;
    this.usage = null;
    this.startedMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.reasoningEndMs = null;
  }

  // Adds one chunk of the stream.
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      this.finish = choice.finish_reason ?? this.finish;
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
      if (!content && !reasoning && !calls) continue;
      this.lastMs = performance.now();
      this.firstMs ??= this.lastMs;
      if (reasoning) this.reasoning += reasoning;
      if (content || calls) this.reasoningEndMs ??= this.lastMs;
      if (content) this.content += content;
      for (const part of calls ?? []) this.takeCall(part);
    }
  }

  takeCall(part) {
    const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "", result: null });
    if (part.id) call.id = part.id;
    if (part.function.name) call.name = part.function.name;
    call.arguments += part.function.arguments ?? "";
  }

  // Calls that wait for the user: only where the answer ended with them are they complete.
  get hasCalls() {
    return this.finish === "tool_calls";
  }

  get isJson() {
    return Boolean(this.body.response_format && this.body.response_format.type !== "text");
  }

  // The messages that this answer is in the history of the next request.
  messages() {
    const message = { role: "assistant", content: this.content };
    if (!this.hasCalls) return [message];
    // What a template keeps of the reasoning is its own matter.
    if (this.reasoning) message.reasoning_content = this.reasoning;
    message.content = this.content || null;
    message.tool_calls = this.calls.map(({ id, name, arguments: args }) => ({
      id, type: "function", function: { name, arguments: args },
    }));
    const results = this.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
    return [message, ...results];
  }

  // Label and value of each number that is known.
  stats() {
    const stats = [];
    if (this.firstMs !== null) stats.push(["first token", shown(this.firstMs - this.startedMs) + " ms"]);
    if (this.usage) {
      const { completion_tokens: tokens, prompt_tokens: prompt } = this.usage;
      const seconds = (this.lastMs - this.firstMs) / 1000;
      // What came in one piece has no speed.
      if (this.firstMs !== null && tokens > 1 && seconds > 0.02) {
        stats.push(["speed", shown((tokens - 1) / seconds) + " tok/s"]);
      }
      stats.push(["output", WHOLE.format(tokens) + " tokens"]);
      const reasoning = this.usage.completion_tokens_details?.reasoning_tokens;
      if (reasoning) stats.push(["of them reasoning", WHOLE.format(reasoning)]);
      stats.push(["prompt", WHOLE.format(prompt) + " tokens"]);
      stats.push(["cached", WHOLE.format(this.usage.prompt_tokens_details?.cached_tokens ?? 0)]);
    }
    if (this.finish) stats.push(["end", this.finish]);
    return stats;
  }
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// One tool call: name, arguments, and a field for the result until it is given.
class CallCard {
  constructor(call) {
    this.call = call;
    this.name = el("span", { className: "name" });
    this.id = el("span", { className: "id" });
    this.args = el("pre", { className: "wrap" });
    this.result = el("div", { className: "result", hidden: true });
    this.field = null;
    this.node = el(
      "section", { className: "call", "aria-label": "Tool call" },
      el("header", {}, "Tool call", this.name, this.id), this.args, this.result,
    );
    this.show();
  }

  show() {
    this.name.textContent = this.call.name;
    this.id.textContent = this.call.id;
    this.args.textContent = prettyJson(this.call.arguments) || "…";
    this.node.setAttribute("aria-label", "Tool call " + this.call.name);
  }

  askForResult() {
    this.field = el("textarea", { className: "code", rows: 2, placeholder: '{"temperature": 21}' });
    this.result.replaceChildren(el("label", {}, "Result of " + this.call.name, this.field));
    this.result.hidden = false;
  }

  // Takes the result from its field, which turns into text.
  settle() {
    this.call.result = this.field.value;
    this.field = null;
    this.result.replaceChildren(
      el("span", { className: "note" }, "Result"),
      el("pre", { className: "wrap" }, prettyJson(this.call.result) || "(empty)"),
    );
  }
}

// Shows one answer. `actions` has the callbacks `retry` and `continueWithResults`.
class AnswerView {
  constructor(answer, actions) {
    this.answer = answer;
    this.actions = actions;
    this.isRaw = false;
    this.cards = [];
    this.continueRow = null;
    this.frame = 0;
    this.waiting = el("p", { className: "waiting" }, "waiting for the first token ");
    this.reasoning = null;
    this.text = el("div", { className: "text formatted", hidden: true });
    this.markdown = new MarkdownView(this.text);
    this.callList = el("div", { className: "stack", hidden: true });
    this.body = el("div", { className: "body" }, this.waiting, this.text, this.callList);
    this.buttons = el("div", { className: "actions" });
    this.stats = el("div", { className: "stats", "aria-live": "off" });
    this.node = el(
      "article", { className: "message assistant running", "aria-label": "Assistant", "aria-busy": "true" },
      el("header", {}, el("span", { className: "who" }, "Assistant"), this.buttons), this.body, this.stats,
    );
  }

  // Draws at most once a frame, however fast tokens come.
  changed(drawn) {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
      drawn();
    });
  }

  draw() {
    const answer = this.answer;
    this.waiting.hidden = answer.firstMs !== null;
    if (answer.reasoning) this.drawReasoning();
    this.text.hidden = !answer.content;
    if (answer.content) this.drawText();
    answer.calls.forEach((call, index) => {
      if (!this.cards[index]) {
        this.cards[index] = new CallCard(call);
        this.callList.append(this.cards[index].node);
        this.callList.hidden = false;
      }
      this.cards[index].show();
    });
    this.stats.replaceChildren(
      ...answer.stats().map(([label, value]) => el("span", {}, label + " ", el("span", { className: "v" }, value))),
    );
  }

  drawText() {
    if (this.isRaw || this.answer.isJson) {
      this.text.classList.remove("formatted");
      this.text.textContent = this.answer.content;
    } else {
      this.text.classList.add("formatted");
      this.markdown.show(this.answer.content);
    }
    this.text.classList.toggle("code", this.answer.isJson);
  }

  drawReasoning() {
    if (this.reasoning === null) {
      const summary = el("summary", {}, "Reasoning");
      const text = el("div", { className: "text" });
      const node = el("details", { className: "reasoning", open: true }, summary, text);
      this.reasoning = { node, summary, text, isFolded: false };
      this.body.prepend(node);
    }
    const { node, summary, text } = this.reasoning;
    if (text.textContent !== this.answer.reasoning) text.textContent = this.answer.reasoning;
    const end = this.answer.reasoningEndMs ?? this.answer.lastMs;
    const tokens = this.answer.usage?.completion_tokens_details?.reasoning_tokens;
    summary.textContent = "Reasoning · " + (tokens ? WHOLE.format(tokens) + " tokens · " : "")
      + shownSeconds((end - this.answer.firstMs) / 1000);
    // It folds once, when the answer begins; afterwards it is the reader's.
    if (this.answer.reasoningEndMs !== null && !this.reasoning.isFolded) {
      this.reasoning.isFolded = true;
      node.open = false;
    }
  }

  // The stream is over, for whatever reason.
  end() {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.waiting.hidden = true;
    const isEmpty = !this.answer.content && !this.answer.reasoning && !this.answer.calls.length;
    if (isEmpty) this.body.append(el("p", { className: "waiting" }, "(no text)"));
    this.node.classList.remove("running");
    this.node.setAttribute("aria-busy", "false");
    const { content, body } = this.answer;
    if (content) this.buttons.append(button("Copy", () => copyText(content, "Answer")));
    if (content && !this.answer.isJson) this.buttons.append(this.rawButton());
    this.buttons.append(
      button("Copy as curl", () => copyText(curlCommand(body), "Command")),
      button("Ask again", () => this.actions.retry(this)),
    );
    if (this.answer.hasCalls) this.askForResults();
    else if (this.cards.length) this.callList.append(el("p", { className: "note" }, "The answer was cut, so these calls are not in the next request."));
  }

  rawButton() {
    const node = button("Plain text", () => {
      this.isRaw = !this.isRaw;
      node.setAttribute("aria-pressed", String(this.isRaw));
      this.markdown = new MarkdownView(this.text);
      this.text.replaceChildren();
      this.drawText();
    });
    node.setAttribute("aria-pressed", "false");
    return node;
  }

  askForResults() {
    this.cards.forEach((card) => card.askForResult());
    const send = button("Send results and continue", () => this.actions.continueWithResults(this), "primary small");
    this.continueRow = el("div", { className: "continue" }, send);
    this.callList.append(this.continueRow);
  }

  get waitsForResults() {
    return this.continueRow?.isConnected ?? false;
  }

  settleCalls() {
    this.cards.forEach((card) => card.settle());
    this.continueRow.remove();
  }
}
