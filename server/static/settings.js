"use strict";
// The form of the next request: its fields to a request body, and what is wrong with them.

const TOOLS_EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The present weather in a city.",
      parameters: {
        type: "object",
        properties: {
          city: { type: "string", description: "Name of the city", maxLength: 40 },
          unit: { type: "string", enum: ["celsius", "fahrenheit"] },
        },
        required: ["city", "unit"],
        additionalProperties: false,
      },
    },
  },
];
const SCHEMA_EXAMPLE = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 40 },
    population: { type: "integer", minimum: 0 },
  },
  required: ["name", "population"],
  additionalProperties: false,
};
// Field of the body, id of the input.
const NUMBERS = [
  ["temperature", "temperature"],
  ["top_p", "top-p"],
  ["max_tokens", "max-tokens"],
  ["seed", "seed"],
];

// A field that cannot be sent; `id` is the input to go to.
class FieldError extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

// The JSON in a text field, null where it is empty.
function jsonField(id, isRight, wanted) {
  const text = $(id).value.trim();
  if (!text) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new FieldError(id, "This is no JSON: " + error.message);
  }
  if (!isRight(value)) throw new FieldError(id, "This must be " + wanted + ".");
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const givenTools = () => jsonField("tools", (value) => Array.isArray(value) && value.length > 0, "a JSON list with at least one tool");
const givenSchema = () => jsonField("schema", isObject, "a JSON object");
const givenExtra = () => jsonField("extra", isObject, "a JSON object");

// The body of a request with these messages, as the form says; throws FieldError.
function requestBody(model, messages) {
  const system = $("system").value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const [field, id] of NUMBERS) {
    if ($(id).validity.badInput) throw new FieldError(id, "This must be a number.");
    if ($(id).value === "") continue;
    body[field] = Number($(id).value);
    if (Math.abs(body[field]) > Number.MAX_SAFE_INTEGER) throw new FieldError(id, "This number is too large for a browser.");
  }
  if ($("thinking").value) body.chat_template_kwargs = { enable_thinking: $("thinking").value === "true" };
  const tools = givenTools();
  if (tools !== null) Object.assign(body, { tools, tool_choice: givenChoice() });
  const format = responseFormat();
  if (format !== null) body.response_format = format;
  return { ...body, ...(givenExtra() ?? {}) };
}

function givenChoice() {
  const value = $("tool-choice").value;
  if (!value.startsWith("name:")) return value;
  return { type: "function", function: { name: value.slice("name:".length) } };
}

function responseFormat() {
  const kind = $("format").value;
  if (kind === "text") return null;
  if (kind === "json_object") return { type: "json_object" };
  const schema = givenSchema();
  if (schema === null) throw new FieldError("schema", "Give a JSON schema, or another answer format.");
  return { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
}

// Shows beside a field what is wrong with it; returns whether it is right.
function checkField(id, read) {
  let message = "";
  try {
    read();
  } catch (error) {
    message = error.message;
  }
  $(id + "-error").textContent = message;
  $(id).setAttribute("aria-invalid", String(message !== ""));
  return message === "";
}

function toolsChanged() {
  const tools = checkField("tools", givenTools) ? givenTools() : null;
  const select = $("tool-choice");
  const before = select.value;
  const names = (tools ?? []).map((tool) => tool?.function?.name).filter((name) => typeof name === "string");
  const options = tools === null ? [["auto", "no tools"]] : [
    ["auto", "auto: the model decides"],
    ["required", "required: at least one call"],
    ["none", "none"],
    ...names.map((name) => ["name:" + name, "only " + name]),
  ];
  select.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
  select.disabled = tools === null;
  if (options.some(([value]) => value === before)) select.value = before;
}

// Opens the form where it is folded away, and goes to a field.
function openSettings(id) {
  $("settings").classList.add("open");
  $("settings-open").setAttribute("aria-expanded", "true");
  $(id).focus();
}

function closeSettings() {
  $("settings").classList.remove("open");
  $("settings-open").setAttribute("aria-expanded", "false");
  $("settings-open").focus();
}

function insertExample(id, example, changed) {
  $(id).value = JSON.stringify(example, null, 1);
  changed();
  $(id).focus();
}

function startSettings() {
  const schemaChanged = () => checkField("schema", givenSchema);
  const formatChanged = () => { $("schema-part").hidden = $("format").value !== "json_schema"; };
  $("tools").addEventListener("input", toolsChanged);
  $("schema").addEventListener("input", schemaChanged);
  $("extra").addEventListener("input", () => checkField("extra", givenExtra));
  $("format").addEventListener("change", formatChanged);
  $("tools-example").addEventListener("click", () => insertExample("tools", TOOLS_EXAMPLE, toolsChanged));
  $("schema-example").addEventListener("click", () => insertExample("schema", SCHEMA_EXAMPLE, schemaChanged));
  $("settings-open").addEventListener("click", () => openSettings("system"));
  $("settings-close").addEventListener("click", closeSettings);
  $("settings").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !$("settings").classList.contains("open")) return;
    event.preventDefault();
    closeSettings();
  });
  toolsChanged();
  formatChanged();
}
