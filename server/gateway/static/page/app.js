// The page: header, list of conversations, and one of two views.

import { stopAnswer } from "./answer.js";
import { Board } from "./board.js";
import { Chat } from "./chat.js";
import { createConversation, deleteConversation, download, loadConversations } from "./conversations.js";
import { poll } from "./poll.js";
import { SettingsPanel, loadSettings, saveSettings } from "./settings.js";
import { html, render, useCallback, useEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";

const KEY = "whalepod.api_key";
const THEME = "whalepod.theme";
const THEMES = { auto: "light", light: "dark", dark: "auto" };

function App() {
  const redraw = useRedraw();
  const [theme, cycleTheme] = useTheme();
  const view = useView();
  const [settings, setSettings] = useState(loadSettings);
  const [apiKey, setApiKey] = useState(() => sessionStorage.getItem(KEY) ?? "");
  const [conversations, setConversations] = useState(loadConversations);
  const [conversation, setConversation] = useState(createConversation);
  const [notice, setNotice] = useState("");
  const [opened, setOpened] = useState(""); // "settings", "list" (where the page is narrow) or ""
  const [model, setModel] = useState("");
  const { samples, failure, needsKey } = usePolling(apiKey);
  const facts = samples.at(-1);
  useEscapeTo(opened, () => setOpened(""));

  const keep = (changed) => (change) => (value) => (changed(value), change(value));
  const onSettings = keep(saveSettings)(setSettings);
  const onKey = keep((value) => sessionStorage.setItem(KEY, value))(setApiKey);
  // the object itself, not a copy from the storage: an answer may be streaming into it
  const onStored = (stored) => setConversations((list) => [stored, ...list.filter(({ id }) => id !== stored.id)]);
  const open = (chosen) => {
    setConversation(chosen);
    setOpened("");
    location.hash = "";
  };
  const remove = (chosen) => {
    if (!confirm(`Delete “${chosen.title}”?`)) return;
    stopAnswer(chosen);
    deleteConversation(chosen);
    setConversations((list) => list.filter(({ id }) => id !== chosen.id));
    if (chosen.id === conversation.id) open(createConversation());
  };
  const context = { settings, key: apiKey, model: model || facts?.models[0] };
  const toggle = (name) => setOpened(opened === name ? "" : name);

  return html`<${Symbols} />
    <header>
      ${view === "chat" && html`<button type="button" class="icon narrow" aria-label="Conversations" aria-expanded=${opened === "list"} onClick=${() => toggle("list")}><${Icon} path="M3 5h14M3 10h14M3 15h14" /></button>`}
      <a class="brand" href="#" aria-label="whalepod"><svg viewBox="0 0 64 40" aria-hidden="true"><use href="#whale" /></svg><span>whalepod</span></a>
      <nav class="tabs" aria-label="Views">
        <a href="#" aria-current=${view === "chat" ? "page" : undefined}>Chat</a>
        <a href="#board" aria-current=${view === "board" ? "page" : undefined}>Board</a>
      </nav>
      <span class="space"></span>
      ${facts?.models.length > 1 && html`<select aria-label="Model" value=${context.model} onChange=${(event) => setModel(event.target.value)}>
        ${facts.models.map((name) => html`<option key=${name}>${name}</option>`)}</select>`}
      <button type="button" class="icon" aria-label=${`Colours: ${theme}. Change`} title=${`Colours: ${theme}`} onClick=${cycleTheme}><${Icon} path=${THEME_ICONS[theme]} /></button>
      <button type="button" class="icon" aria-label="Settings" title="Settings" aria-expanded=${opened === "settings"} onClick=${() => toggle("settings")}><${Icon} path="M3 6h7m4 0h3M3 14h3m4 0h7M12 3.8v4.4M8 11.8v4.4" /></button>
    </header>
    ${needsKey && html`<${KeyForm} isWrong=${apiKey !== ""} onKey=${onKey} />`}
    ${notice && html`<p class="error banner" role="alert">${notice} <button type="button" onClick=${() => setNotice("")}>Dismiss</button></p>`}
    <div class="views">
      ${view === "chat"
        ? html`<${ConversationList} conversations=${conversations} current=${conversation} isOpen=${opened === "list"} onOpen=${open} onRemove=${remove} />
            <${Chat} conversation=${conversation} context=${context} facts=${facts} redraw=${redraw} onStored=${onStored} onNotice=${setNotice} />`
        : html`<${Board} samples=${samples} theme=${theme} failure=${failure} />`}
      ${opened === "settings" && html`<${SettingsPanel} settings=${settings} onSettings=${onSettings} apiKey=${apiKey} onKey=${onKey} onClose=${() => setOpened("")} />`}
    </div>`;
}

const THEME_ICONS = {
  auto: "M10 3a7 7 0 1 0 0 14zM10 3a7 7 0 0 1 0 14",
  light: "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7M10 2v1.5m0 13V18M2 10h1.5m13 0H18M4.3 4.3l1.1 1.1m9.2 9.2 1.1 1.1m0-11.4-1.1 1.1M5.4 14.6l-1.1 1.1",
  dark: "M16.5 12.3A7 7 0 0 1 7.7 3.5a7 7 0 1 0 8.8 8.8z",
};

function Icon({ path }) {
  return html`<svg viewBox="0 0 20 20" aria-hidden="true"><path d=${path} /></svg>`;
}

function Symbols() {
  return html`<svg class="hidden" aria-hidden="true"><symbol id="whale" viewBox="0 0 64 40">
    <path d="M3 21C3 10 14 5 26 5c13 0 18 8 26 8 1-4 4-7 9-7-1 5-3 8-6 10 0 9-12 16-28 16C13 32 3 29 3 21z" />
    <path d="M24 33c1 3 4 5 8 5-1-2-1-4 0-6z" /><circle class="eye" cx="13" cy="19" r="1.8" />
  </symbol></svg>`;
}

function KeyForm({ isWrong, onKey }) {
  const field = useRef();
  const onSubmit = (event) => {
    event.preventDefault();
    onKey(field.current.value.trim());
  };
  return html`<form class="banner" onSubmit=${onSubmit}>
    <label>${isWrong ? "The server refused this API key." : "This server asks for an API key."}
      <input ref=${field} type="password" autocomplete="off" /></label>
    <button class="primary">Use key</button>
  </form>`;
}

function ConversationList({ conversations, current, isOpen, onOpen, onRemove }) {
  return html`<nav class="list ${isOpen ? "open" : ""}" aria-label="Conversations">
    <button type="button" class="new" onClick=${() => onOpen(createConversation())}><${Icon} path="M10 4v12M4 10h12" />New conversation</button>
    <ul>${conversations.map((one) => html`<li key=${one.id} class=${one.id === current.id ? "current" : ""}>
      <button type="button" class="title" aria-current=${one.id === current.id ? "true" : undefined}
        onClick=${() => onOpen(one)}>${one.title}</button>
      <button type="button" class="icon" aria-label=${`Export ${one.title}`} title="Export as JSON" onClick=${() => download(`whalepod-${one.id}.json`, one)}><${Icon} path="M10 3v9m-4-4 4 4 4-4M4 16h12" /></button>
      <button type="button" class="icon" aria-label=${`Delete ${one.title}`} title="Delete" onClick=${() => onRemove(one)}><${Icon} path="M5 5l10 10M15 5 5 15" /></button>
    </li>`)}</ul>
    ${conversations.length > 0 && html`<button type="button" onClick=${() => download("whalepod-conversations.json", conversations)}>Export all</button>`}
  </nav>`;
}

/** Redraw at most 30 times a second: tokens may come faster than that. */
function useRedraw() {
  const [, count] = useReducer((n) => n + 1, 0);
  const timer = useRef(0);
  return useCallback(() => {
    timer.current ||= setTimeout(() => {
      timer.current = 0;
      count();
    }, 33);
  }, []);
}

function useTheme() {
  const [theme, setTheme] = useState(() => localStorage.getItem(THEME) ?? "auto");
  document.documentElement.dataset.theme = theme;
  const cycle = () => {
    localStorage.setItem(THEME, THEMES[theme]);
    setTheme(THEMES[theme]);
  };
  return [theme, cycle];
}

function useView() {
  const read = () => (location.hash === "#board" ? "board" : "chat");
  const [view, setView] = useState(read);
  useEffect(() => {
    const onChange = () => setView(read());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  return view;
}

function usePolling(key) {
  const [state, setState] = useState({ samples: [], failure: null, needsKey: false });
  useEffect(() => poll(
    key,
    (samples) => setState({ samples: [...samples], failure: null, needsKey: false }),
    (error) => setState((old) => ({ ...old, failure: error.status ? error.message : "The server does not answer.", needsKey: error.status === 401 })),
  ), [key]);
  return state;
}

function useEscapeTo(opened, close) {
  useEffect(() => {
    if (!opened) return undefined;
    const onKeyDown = (event) => event.key === "Escape" && close();
    document.addEventListener("keydown", onKeyDown);
    return () => document.removeEventListener("keydown", onKeyDown);
  }, [opened]);
}

render(html`<${App} />`, document.getElementById("app"));
