"use strict";
// Small helpers over the DOM. All scripts of the page share one scope, in the order of index.html.
// Text from a model or a server reaches the page through text nodes only, never as markup; the
// content policy (trusted types) forbids anything else.

const $ = (id) => document.getElementById(id);

// An element with properties, data and children; children are nodes or texts, null is left out.
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(node.dataset, value);
    else if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function button(text, onClick, className = "quiet small") {
  const node = el("button", { type: "button", className }, text);
  node.addEventListener("click", onClick);
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Says something to screen readers without showing it.
function announce(text) {
  $("announce").textContent = text;
}

let toastTimer = 0;
function toast(text) {
  $("toast").textContent = text;
  $("toast").classList.add("shown");
  announce(text);
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => $("toast").classList.remove("shown"), 1800);
}

// Copies, or where the browser does not allow it (no TLS, not localhost) shows the text to copy.
async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(what + " copied");
  } catch {
    $("copy-text").value = text;
    $("copy-dialog").showModal();
    $("copy-text").select();
  }
}

const NUMBER = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

// A number for people: few digits, and a dash for what is not known.
function shown(value) {
  if (value === null || value === undefined) return "–";
  return (Math.abs(value) < 100 ? NUMBER : WHOLE).format(value);
}

function shownSeconds(seconds) {
  if (seconds < 120) return shown(seconds) + " s";
  if (seconds < 7200) return WHOLE.format(seconds / 60) + " min";
  return NUMBER.format(seconds / 3600) + " h";
}
