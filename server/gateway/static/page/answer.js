// One answer: ask, stream into a message of the conversation, measure, stop.

import { ApiFailure, addChunk, firstModel, readEvents, request, requestBody } from "./api.js";
import { addMessage, wireMessages } from "./conversations.js";

const controllers = new Map(); // conversation id -> what stops its answer

export function isAnswering(conversation) {
  return controllers.has(conversation.id);
}

export function stopAnswer(conversation) {
  controllers.get(conversation.id)?.abort();
}

/** Stream an answer to `parent`; returns its finished message. `changed` is called at each piece. */
export async function ask(conversation, parent, { settings, model, key }, changed) {
  const node = addMessage(conversation, parent, {
    role: "assistant", content: "", reasoning: "", toolCalls: [], state: "streaming", model,
  });
  const controller = new AbortController();
  controllers.set(conversation.id, controller);
  changed();
  try {
    node.model ||= await firstModel(key);
    const body = requestBody(settings, node.model, wireMessages(conversation, parent));
    await stream(node, body, key, controller.signal, changed);
    node.state = "done";
  } catch (error) {
    node.state = error.name === "AbortError" ? "stopped" : "failed";
    if (node.state === "failed") node.error = describe(error);
  } finally {
    controllers.delete(conversation.id);
    changed();
  }
  return node;
}

async function stream(node, body, key, signal, changed) {
  const started = performance.now();
  let first = 0;
  let numPieces = 0;
  const response = await request("v1/chat/completions", key, {
    method: "POST", body: JSON.stringify(body), signal, headers: { "Content-Type": "application/json" },
  });
  for await (const chunk of readEvents(response)) {
    if (addChunk(node, chunk)) {
      numPieces += 1;
      first ||= performance.now();
      node.first_token_ms = first - started;
      node.num_tokens = numPieces; // a piece is about a token; the usage at the end is exact
      if (numPieces > 1) node.tokens_per_s = (numPieces - 1) / ((performance.now() - first) / 1000);
    } else if (chunk.usage && first) {
      node.num_tokens = chunk.usage.completion_tokens;
      const seconds = (performance.now() - first) / 1000;
      if (node.num_tokens > 1 && seconds > 0) node.tokens_per_s = (node.num_tokens - 1) / seconds;
    }
    changed();
  }
  if (!node.finish) throw new ApiFailure(0, "the stream ended before the answer did");
}

function describe(error) {
  if (error instanceof ApiFailure) return error.message;
  if (error instanceof TypeError) return "the server cannot be reached";
  return error.message;
}
