// One message of a conversation.

import { copyText, onCopyClick, renderMarkdown } from "./markdown.js";
import { html, useMemo, useState } from "./vendor/htm-preact.js";

export function Message({ node, siblings, isLast, isBusy, actions }) {
  const View = { user: UserMessage, assistant: AssistantMessage, tool: ToolMessage }[node.role];
  return html`<li class="message ${node.role}">
    <${View} node=${node} isLast=${isLast} isBusy=${isBusy} actions=${actions}>
      <${Branches} node=${node} siblings=${siblings} isBusy=${isBusy} actions=${actions} />
    <//>
  </li>`;
}

function Branches({ node, siblings, isBusy, actions }) {
  if (siblings.length < 2) return null;
  const index = siblings.indexOf(node);
  return html`<span class="branches" role="group" aria-label="Branches">
    <button type="button" aria-label="Earlier branch" disabled=${isBusy || index === 0} onClick=${() => actions.choose(node, -1)}>‹</button>
    <span>${index + 1} / ${siblings.length}</span>
    <button type="button" aria-label="Later branch" disabled=${isBusy || index === siblings.length - 1} onClick=${() => actions.choose(node, 1)}>›</button>
  </span>`;
}

function UserMessage({ node, isBusy, actions, children }) {
  const [draft, setDraft] = useState(null);
  if (draft !== null) {
    const close = () => setDraft(null);
    const send = () => {
      close();
      if (draft.trim()) actions.edit(node, draft);
    };
    const onKeyDown = (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    };
    return html`<div class="editor">
      <textarea aria-label="Edit your message" rows="3" value=${draft} ref=${focusOnce}
        onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKeyDown}></textarea>
      <div class="actions"><button type="button" class="primary" onClick=${send}>Send as new branch</button>
        <button type="button" onClick=${close}>Cancel</button></div>
    </div>`;
  }
  return html`<h3 class="hidden">You</h3>
    <div class="bubble">${node.content}</div>
    <div class="actions">${children}
      <button type="button" disabled=${isBusy} onClick=${() => setDraft(node.content)}>Edit</button>
    </div>`;
}

function focusOnce(element) {
  if (element && element !== document.activeElement && !element.dataset.focused) {
    element.dataset.focused = "1";
    element.focus();
  }
}

function AssistantMessage({ node, isLast, isBusy, actions, children }) {
  const isStreaming = node.state === "streaming";
  return html`<h3 class="who"><${Mark} />${node.model}</h3>
    <${Reasoning} node=${node} />
    <${Markdown} text=${node.content} />
    ${node.toolCalls.map((call, i) => html`<${ToolCall} key=${i} call=${call} />`)}
    ${isStreaming && html`<p class="waiting"><i></i><i></i><i></i><span class="hidden">The answer is being written</span></p>`}
    ${node.state === "failed" && html`<p class="error" role="alert">${node.error}</p>`}
    ${isLast && node.state === "done" && node.toolCalls.length > 0 && html`<${ToolResults} node=${node} actions=${actions} />`}
    <div class="actions">${children}
      ${!isStreaming && html`<button type="button" onClick=${() => copyText(node.content)}>Copy</button>
        <button type="button" disabled=${isBusy} onClick=${() => actions.regenerate(node)}>Regenerate</button>`}
      <${Measures} node=${node} />
    </div>`;
}

function Mark() {
  return html`<svg viewBox="0 0 64 40" aria-hidden="true"><use href="#whale" /></svg>`;
}

function Reasoning({ node }) {
  if (!node.reasoning) return null;
  const isThinking = node.state === "streaming" && !node.content && !node.toolCalls.length;
  return html`<details class="fold">
    <summary>${isThinking ? "Thinking …" : "Thoughts"}</summary>
    <div class="thoughts">${node.reasoning}</div>
  </details>`;
}

function Markdown({ text }) {
  const markup = useMemo(() => ({ __html: renderMarkdown(text) }), [text]);
  return html`<div class="prose" onClick=${onCopyClick} dangerouslySetInnerHTML=${markup}></div>`;
}

function ToolCall({ call }) {
  return html`<details class="fold">
    <summary>Calls <code>${call.name || "…"}</code></summary>
    <pre tabindex="0">${pretty(call.arguments)}</pre>
  </details>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still being written, or broken: as the model wrote it
  }
}

function ToolResults({ node, actions }) {
  const [results, setResults] = useState(node.toolCalls.map(() => ""));
  const set = (i) => (event) => setResults(results.with(i, event.target.value));
  return html`<form class="results" onSubmit=${(event) => { event.preventDefault(); actions.sendResults(node, results); }}>
    ${node.toolCalls.map((call, i) => html`<label class="field" key=${i}>Result of ${call.name}
      <textarea rows="2" class="mono" value=${results[i]} onInput=${set(i)}></textarea>
    </label>`)}
    <button class="primary">Send results</button>
  </form>`;
}

function ToolMessage({ node }) {
  return html`<details class="fold"><summary>Result of <code>${node.name}</code></summary><pre tabindex="0">${node.content}</pre></details>`;
}

function Measures({ node }) {
  const parts = [];
  if (node.first_token_ms) parts.push(`first token ${milliseconds(node.first_token_ms)}`);
  if (node.tokens_per_s) parts.push(`${node.tokens_per_s.toFixed(node.tokens_per_s < 100 ? 1 : 0)} tok/s`);
  if (node.num_tokens) parts.push(`${node.num_tokens} tokens`);
  const cached = node.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${node.usage.prompt_tokens} prompt tokens cached`);
  if (node.state === "stopped") parts.push("stopped");
  if (node.finish === "length") parts.push("cut at the token limit");
  return html`<span class="measures">${parts.join(" · ")}</span>`;
}

const milliseconds = (value) => (value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`);
