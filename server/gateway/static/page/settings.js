// The panel of settings. Everything but the API key is kept in localStorage; the key only as long as the tab.

import { html, useEffect, useRef } from "./vendor/htm-preact.js";

const STORED = "whalepod.settings";
const DEFAULTS = {
  system: "", temperature: "", top_p: "", top_k: "", max_tokens: "", seed: "",
  thinking: "", tools: "", extra: "",
};
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
];
const TOOLS_EXAMPLE = `[{"type": "function", "function": {
  "name": "get_weather",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]`;

export function loadSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(STORED)) };
  } catch {
    return { ...DEFAULTS };
  }
}

export function saveSettings(settings) {
  localStorage.setItem(STORED, JSON.stringify(settings));
}

export function SettingsPanel({ settings, onSettings, apiKey, onKey, onClose }) {
  const heading = useRef();
  useEffect(() => heading.current.focus(), []);
  const set = (name) => (event) => onSettings({ ...settings, [name]: event.target.value });
  const isDefault = Object.keys(DEFAULTS).every((name) => settings[name] === DEFAULTS[name]);
  return html`<aside class="panel" aria-label="Settings">
    <div class="panel-head">
      <h2 tabindex="-1" ref=${heading}>Settings</h2>
      <button type="button" onClick=${onClose}>Close</button>
    </div>
    <label class="field">System prompt
      <textarea rows="4" value=${settings.system} onInput=${set("system")}></textarea>
    </label>
    <fieldset>
      <legend>Sampling <small>empty: the server’s default</small></legend>
      <div class="grid">
        ${NUMBERS.map(([name, label, range]) => html`<label class="field" key=${name}>${label}
          <input type="number" name=${name} ...${range} value=${settings[name]} placeholder="default" onInput=${set(name)} />
        </label>`)}
        <label class="field">Thinking
          <select value=${settings.thinking} onChange=${set("thinking")}>
            <option value="">default</option><option value="on">on</option><option value="off">off</option>
          </select>
        </label>
      </div>
    </fieldset>
    <label class="field">Tools <small>JSON list, as in the API</small>
      <textarea rows="5" class="mono" spellcheck="false" placeholder=${TOOLS_EXAMPLE} value=${settings.tools} onInput=${set("tools")}></textarea>
    </label>
    <label class="field">More fields <small>JSON object, added to each request</small>
      <textarea rows="2" class="mono" spellcheck="false" placeholder='{"min_p": 0.05}' value=${settings.extra} onInput=${set("extra")}></textarea>
    </label>
    <button type="button" disabled=${isDefault} onClick=${() => onSettings({ ...DEFAULTS })}>Reset to defaults</button>
    <hr />
    <label class="field">API key <small>kept until this tab closes</small>
      <input type="password" autocomplete="off" value=${apiKey} onChange=${(event) => onKey(event.target.value.trim())} />
    </label>
  </aside>`;
}
