// A conversation is a tree of messages: editing or regenerating adds a branch, nothing is lost.
// Each one has its own key in localStorage, so that two tabs do not overwrite each other's.

const PREFIX = "whalepod.conversation.";
const ROOT = "root";

export function newId() {
  // crypto.randomUUID exists on https and localhost only
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function createConversation() {
  const now = Date.now();
  return { id: newId(), title: "New conversation", created: now, updated: now, nodes: {}, chosen: {} };
}

/** Append a message below `parent` (null: at the start) and make it the chosen branch. */
export function addMessage(conversation, parent, fields) {
  const node = { id: newId(), parent: parent?.id ?? ROOT, created: Date.now(), ...fields };
  conversation.nodes[node.id] = node;
  conversation.chosen[node.parent] = node.id;
  conversation.updated = node.created;
  if (node.role === "user" && node.parent === ROOT) conversation.title = node.content.trim().slice(0, 60);
  return node;
}

/** Return the chosen branch, first message first. */
export function chosenPath(conversation) {
  const path = [];
  let id = conversation.chosen[ROOT];
  while (id) {
    path.push(conversation.nodes[id]);
    id = conversation.chosen[id];
  }
  return path;
}

/** Return the messages that stand in the same place as `node`, oldest first. */
export function siblingsOf(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent);
}

export function chooseSibling(conversation, node, offset) {
  const siblings = siblingsOf(conversation, node);
  const next = siblings[siblings.indexOf(node) + offset];
  if (next) conversation.chosen[node.parent] = next.id;
}

export function parentOf(conversation, node) {
  return conversation.nodes[node.parent] ?? null;
}

/** Return the chosen branch up to and including `last`, as the API takes it. */
export function wireMessages(conversation, last) {
  const path = [];
  for (let node = last; node; node = parentOf(conversation, node)) path.unshift(node);
  return path.filter((node) => node.content || node.role !== "assistant" || node.toolCalls.length).map(wireMessage);
}

function wireMessage(node) {
  if (node.role === "user") return { role: "user", content: node.content };
  if (node.role === "tool") return { role: "tool", tool_call_id: node.toolCallId, content: node.content };
  const message = { role: "assistant", content: node.content };
  if (node.toolCalls.length) {
    message.tool_calls = node.toolCalls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
    // templates keep the thoughts of a turn only while its tools run
    if (node.reasoning) message.reasoning_content = node.reasoning;
  }
  return message;
}

/** Return all stored conversations, newest first. What cannot be read is left alone. */
export function loadConversations() {
  const conversations = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map(read).filter(Boolean);
  return conversations.sort((a, b) => b.updated - a.updated);
}

function read(key) {
  try {
    const conversation = JSON.parse(localStorage.getItem(key));
    for (const node of Object.values(conversation.nodes)) {
      if (node.state === "streaming") node.state = "stopped"; // the page was closed meanwhile
    }
    return conversation;
  } catch {
    return null;
  }
}

/** Store a conversation; returns why that failed (a full or forbidden storage), or null. */
export function saveConversation(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return null;
  } catch (error) {
    return `this conversation could not be stored: ${error.message}`;
  }
}

export function deleteConversation(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
}

/** Offer `data` as a file. */
export function download(name, data) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 2)], { type: "application/json" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
