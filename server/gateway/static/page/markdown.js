// Markdown of a model's answer. HTML in it is shown as text; the result is sanitised all the same.

import DOMPurify from "./vendor/dompurify.js";
import { Marked } from "./vendor/marked.js";

const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    // an image would ask another host: show where it would come from
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});
const ALLOWED = {
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["img", "audio", "video", "picture", "source", "style", "form", "input", "button", "textarea", "select", "dialog"],
  FORBID_ATTR: ["style", "class", "id", "name"],
  RETURN_DOM_FRAGMENT: true,
};

/** Return safe HTML: links open elsewhere, code has a bar with a copy button. */
export function renderMarkdown(text) {
  const fragment = DOMPurify.sanitize(withLanguages(marked.parse(text)), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of fragment.querySelectorAll("table")) wrap(table, "scroll").tabIndex = 0;
  for (const block of fragment.querySelectorAll("pre")) addBar(block);
  const holder = document.createElement("div");
  holder.append(fragment);
  return holder.innerHTML;
}

// classes do not survive: the language travels in an attribute that does
const withLanguages = (html) => html.replace(/<code class="language-([\w+#.-]+)">/g, '<code title="$1">');

function addBar(block) {
  const language = block.firstElementChild?.title ?? "";
  block.firstElementChild?.removeAttribute("title");
  block.tabIndex = 0; // long lines scroll, also by keyboard
  const bar = document.createElement("div");
  bar.className = "code-bar";
  const label = document.createElement("span");
  label.textContent = language || "code";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  bar.append(label, button);
  wrap(block, "code").prepend(bar);
}

function wrap(element, className) {
  const wrapper = document.createElement("div");
  wrapper.className = className;
  element.replaceWith(wrapper);
  wrapper.append(element);
  return wrapper;
}

/** Copy to the clipboard, also on plain http, where the new interface does not exist. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Click handler of a container with rendered Markdown. */
export async function onCopyClick(event) {
  const button = event.target.closest("button.copy");
  if (!button) return;
  await copyText(button.closest(".code").querySelector("pre").textContent);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
