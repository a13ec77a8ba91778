"use strict";
// What belongs to the whole page: theme, views, the key, and the start.

const THEME_ITEM = "compiled-engine-theme";

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

// The choice is remembered where the browser allows it; the page works without.
function startTheme() {
  try {
    $("theme").value = localStorage.getItem(THEME_ITEM) ?? "system";
  } catch {
    $("theme").value = "system";
  }
  setTheme($("theme").value);
  $("theme").addEventListener("change", () => {
    setTheme($("theme").value);
    try {
      localStorage.setItem(THEME_ITEM, $("theme").value);
    } catch {
      // storage is switched off
    }
  });
}

// In a narrow window one of chat and live numbers is shown; in a wide one both are.
function setView(name) {
  document.body.dataset.view = name;
  for (const view of ["chat", "live"]) $("view-" + view).setAttribute("aria-pressed", String(view === name));
}

function openKeyForm(reason) {
  $("key-label").textContent = reason;
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("key").focus();
}

function closeKeyForm() {
  $("key-form").hidden = true;
}

function startKey() {
  $("key-open").addEventListener("click", () => openKeyForm("API key of this server"));
  $("key-cancel").addEventListener("click", () => {
    closeKeyForm();
    $("key-open").focus();
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    apiKey = $("key").value.trim();
    $("key").value = "";
    $("key-open").textContent = apiKey ? "API key set" : "API key";
    if (!live.isLocked) closeKeyForm();
    poll();
    $("input").focus();
  });
}

startTheme();
startSettings();
startChat();
startKey();
for (const view of ["chat", "live"]) $("view-" + view).addEventListener("click", () => setView(view));
startLive();
$("input").focus();
