// The conversation and the line to write in.

import { ask, isAnswering, stopAnswer } from "./answer.js";
import { addMessage, chooseSibling, chosenPath, parentOf, saveConversation, siblingsOf } from "./conversations.js";
import { Message } from "./message.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

const STARTERS = ["Hello, who are you?", "What is 27 + 45?", "Write three lines about whales."];

export function Chat({ conversation, context, facts, redraw, onStored, onNotice }) {
  const isBusy = isAnswering(conversation);
  const path = chosenPath(conversation);
  const [status, setStatus] = useState("");

  async function answer(parent) {
    setStatus("");
    save();
    const node = await ask(conversation, parent, context, redraw);
    save();
    setStatus(spoken(node));
  }

  function save() {
    const problem = saveConversation(conversation);
    if (problem) onNotice(problem);
    onStored(conversation);
  }

  const actions = {
    send: (text) => answer(addMessage(conversation, path.at(-1) ?? null, { role: "user", content: text })),
    edit: (node, text) => answer(addMessage(conversation, parentOf(conversation, node), { role: "user", content: text })),
    regenerate: (node) => answer(parentOf(conversation, node)),
    choose(node, offset) {
      chooseSibling(conversation, node, offset);
      save();
      redraw();
    },
    sendResults(node, results) {
      let parent = node;
      node.toolCalls.forEach((call, i) => {
        parent = addMessage(conversation, parent, { role: "tool", toolCallId: call.id, name: call.name, content: results[i] });
      });
      return answer(parent);
    },
  };
  useEscape(isBusy, () => stopAnswer(conversation));

  return html`<main class="chat">
    <${Scroller} watch=${conversation.id}>
      ${path.length === 0 && html`<${Welcome} facts=${facts} onStart=${actions.send} />`}
      <ol class="messages" aria-label="Conversation">
        ${path.map((node) => html`<${Message} key=${node.id} node=${node} siblings=${siblingsOf(conversation, node)}
          isLast=${node === path.at(-1)} isBusy=${isBusy} actions=${actions} />`)}
      </ol>
    <//>
    <div class="hidden" role="status" aria-live="polite">${status}</div>
    <${Composer} key=${conversation.id} isBusy=${isBusy} onSend=${actions.send} onStop=${() => stopAnswer(conversation)} />
  </main>`;
}

/** What a screen reader says once, at the end of an answer. */
function spoken(node) {
  if (node.state === "failed") return ""; // its message is an alert of its own
  if (node.state === "stopped") return "Answer stopped.";
  const calls = node.toolCalls.map((call) => call.name).join(", ");
  return calls ? `The model calls ${calls}.` : `Answer complete. ${node.content.slice(0, 2000)}`;
}

function useEscape(isActive, action) {
  useEffect(() => {
    if (!isActive) return undefined;
    const onKeyDown = (event) => event.key === "Escape" && action();
    document.addEventListener("keydown", onKeyDown);
    return () => document.removeEventListener("keydown", onKeyDown);
  });
}

/** Follows the end of its content unless the reader has scrolled up. */
function Scroller({ watch, children }) {
  const box = useRef();
  const follows = useRef(true);
  useLayoutEffect(() => {
    follows.current = true;
  }, [watch]);
  useLayoutEffect(() => {
    if (follows.current) box.current.scrollTop = box.current.scrollHeight;
  });
  const onScroll = ({ target }) => {
    follows.current = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
  };
  return html`<div class="scroller" ref=${box} onScroll=${onScroll} tabindex="0" role="region" aria-label="Messages">
    <div class="column">${children}</div>
  </div>`;
}

function Welcome({ facts, onStart }) {
  return html`<div class="welcome">
    <svg class="pod" viewBox="0 0 230 110" aria-hidden="true">
      <use href="#whale" x="10" y="20" width="120" height="75" />
      <use href="#whale" x="140" y="8" width="64" height="40" opacity=".55" />
      <use href="#whale" x="150" y="62" width="44" height="28" opacity=".35" />
    </svg>
    <h1>${facts ? facts.models[0] : "whalepod"}</h1>
    ${facts && html`<p>${facts.engine.model_type} · ${facts.engine.dtype} · ${facts.engine.kernels} kernels ·
      ${" " + facts.engine.max_model_len.toLocaleString("en")} tokens of context</p>`}
    <div class="starters">${STARTERS.map((text) => html`<button type="button" key=${text} onClick=${() => onStart(text)}>${text}</button>`)}</div>
  </div>`;
}

function Composer({ isBusy, onSend, onStop }) {
  const [text, setText] = useState("");
  const area = useRef();
  useEffect(() => area.current.focus({ preventScroll: true }), []);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${area.current.scrollHeight + 2}px`;
  }, [text]);
  const send = () => {
    if (isBusy || !text.trim()) return;
    setText("");
    onSend(text);
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  return html`<form class="composer" onSubmit=${(event) => { event.preventDefault(); send(); }}>
    <textarea ref=${area} rows="1" aria-label="Message" placeholder="Write a message" value=${text}
      onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
    ${isBusy
      ? html`<button type="button" key="stop" class="round" aria-label="Stop" title="Stop (Esc)" onClick=${onStop}><svg viewBox="0 0 20 20" aria-hidden="true"><rect x="5" y="5" width="10" height="10" rx="1.5" /></svg></button>`
      : html`<button key="send" class="round" aria-label="Send" title="Send (Enter)" disabled=${!text.trim()}><svg viewBox="0 0 20 20" aria-hidden="true"><path d="M10 16V5m-5 5 5-5 5 5" /></svg></button>`}
    <p class="hint">Enter sends · Shift+Enter starts a line · Esc stops</p>
  </form>`;
}
