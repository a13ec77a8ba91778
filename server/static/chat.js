"use strict";
// The chat page: keeps the conversation in memory, streams answers from /v1/chat/completions.
// All text reaches the page as text nodes, never as markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const KEY = "compiled-engine-api-key";
  const state = { messages: [], model: null, controller: null };

  function headers() {
    const key = sessionStorage.getItem(KEY);
    const result = { "Content-Type": "application/json" };
    if (key) result.Authorization = "Bearer " + key;
    return result;
  }

  async function errorText(response) {
    try {
      return (await response.json()).error.message;
    } catch {
      return "the server answered " + response.status;
    }
  }

  async function connect() {
    try {
      const response = await fetch("/v1/models", { headers: headers() });
      $("key-form").hidden = response.status !== 401;
      if (response.status === 401) {
        $("model").textContent = "locked";
        $("key").focus();
        return;
      }
      if (!response.ok) throw new Error(await errorText(response));
      state.model = (await response.json()).data[0].id;
      $("model").textContent = state.model;
      document.title = state.model + " – compiled-engine";
      await waitUntilReady();
      $("input").focus();
    } catch (error) {
      $("model").textContent = "not reachable";
      $("stats").textContent = error.message;
    }
  }

  async function waitUntilReady() {
    for (;;) {
      const response = await fetch("/ready");
      const health = await response.json();
      if (response.ok) {
        $("stats").textContent = "\u00a0";
        return;
      }
      $("stats").textContent = health.status + (health.phase_detail ? " – " + health.phase_detail : "");
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  function show(role, text) {
    const box = document.createElement("div");
    box.className = "message " + role;
    box.dataset.role = role;
    const node = document.createTextNode(text);
    box.append(node);
    $("messages").append(box);
    box.scrollIntoView({ block: "end" });
    return { box, node };
  }

  function setRunning(controller) {
    state.controller = controller;
    $("send").hidden = controller !== null;
    $("stop").hidden = controller === null;
    $("new").disabled = controller !== null;
  }

  function requestBody() {
    const system = $("system").value.trim();
    const body = {
      model: state.model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...state.messages],
      stream: true,
      stream_options: { include_usage: true },
    };
    if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
    if ($("max-tokens").value !== "") body.max_tokens = Number($("max-tokens").value);
    return body;
  }

  // Yields the JSON of each event; an event may come in any number of pieces.
  async function* events(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the connection ended before the answer did");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  }

  async function answer() {
    const controller = new AbortController();
    setRunning(controller);
    const { box, node } = show("assistant", "");
    box.classList.add("running");
    const started = performance.now();
    let first = null;
    let usage = null;
    let finish = null;
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST",
        headers: headers(),
        body: JSON.stringify(requestBody()),
        signal: controller.signal,
      });
      if (!response.ok) throw new Error(await errorText(response));
      for await (const event of events(response.body)) {
        if (event.usage) usage = event.usage;
        for (const choice of event.choices) {
          finish = choice.finish_reason ?? finish;
          if (!choice.delta.content) continue;
          first ??= performance.now();
          node.appendData(choice.delta.content);
          const list = $("messages");
          if (list.scrollHeight - list.scrollTop - list.clientHeight < 120) {
            list.scrollTop = list.scrollHeight;
          }
        }
      }
    } catch (error) {
      if (controller.signal.aborted) finish = "stopped by you";
      else show("error", error.message);
    } finally {
      box.classList.remove("running");
      if (node.data) state.messages.push({ role: "assistant", content: node.data });
      else box.remove();
      showStats({ started, first, usage, finish });
      setRunning(null);
      $("input").focus();
    }
  }

  function showStats({ started, first, usage, finish }) {
    const parts = [];
    if (first !== null) parts.push("first token " + Math.round(first - started) + " ms");
    if (usage) {
      parts.push(usage.completion_tokens + " tokens");
      const seconds = (performance.now() - first) / 1000;
      if (first !== null && usage.completion_tokens > 1 && seconds > 0) {
        parts.push(((usage.completion_tokens - 1) / seconds).toFixed(1) + " tokens/s");
      }
      const cached = usage.prompt_tokens_details.cached_tokens;
      parts.push("prompt " + usage.prompt_tokens + (cached ? " (" + cached + " cached)" : ""));
    }
    if (finish) parts.push("end: " + finish);
    $("stats").textContent = parts.join(" · ") || "\u00a0";
  }

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("input").value.trim();
    if (!text || state.controller !== null || state.model === null) return;
    $("input").value = "";
    state.messages.push({ role: "user", content: text });
    show("user", text);
    answer();
  });
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("form").requestSubmit();
    }
  });
  $("stop").addEventListener("click", () => state.controller?.abort());
  $("new").addEventListener("click", () => {
    state.messages = [];
    $("messages").replaceChildren();
    $("stats").textContent = "\u00a0";
    $("input").focus();
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, $("key").value);
    $("key").value = "";
    connect();
  });
  connect();
})();
