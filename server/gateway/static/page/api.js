// Requests to the server that this page came from, and the fold of a streamed answer.

export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetch a path below the page's own; throws ApiFailure with the server's message. */
export async function request(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) throw new ApiFailure(response.status, await messageOf(response));
  return response;
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

/** Yield the JSON of each event of a server-sent stream, up to [DONE]. */
export async function* readEvents(response) {
  let text = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (text + value).split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue; // a ping
      if (frame === "data: [DONE]") return;
      yield JSON.parse(frame.slice(6));
    }
  }
}

/** Add a chunk to the answer `node`; returns whether it brought something new to show. */
export function addChunk(node, chunk) {
  if (chunk.error) throw new ApiFailure(0, chunk.error.message);
  if (chunk.usage) node.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  const { content, reasoning_content: thoughts, reasoning, tool_calls: calls } = choice.delta;
  node.content += content ?? "";
  node.reasoning += thoughts ?? reasoning ?? "";
  for (const call of calls ?? []) addCall(node.toolCalls, call);
  if (choice.finish_reason) node.finish = choice.finish_reason;
  return Boolean(content || thoughts || reasoning || calls?.length);
}

function addCall(calls, delta) {
  const call = (calls[delta.index] ??= { id: "", name: "", arguments: "" });
  call.id ||= delta.id ?? "";
  call.name += delta.function?.name ?? "";
  call.arguments += delta.function?.arguments ?? "";
}

/** Name a model to ask, for a question that comes before the page knows what is served. */
export async function firstModel(key) {
  const response = await request("v1/models", key);
  return (await response.json()).data[0].id;
}

/** Return a request body; throws an Error that names the setting that is wrong. */
export function requestBody(settings, model, messages) {
  const system = settings.system.trim();
  const body = {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.thinking) body.thinking = settings.thinking === "on";
  const tools = parse("tools", settings.tools, Array.isArray, "a list");
  if (tools?.length) body.tools = tools;
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  return { ...body, ...parse("more fields", settings.extra, isObject, "an object") };
}

function parse(name, text, isValid, wanted) {
  if (!text.trim()) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`The setting “${name}” is not JSON: ${error.message}`);
  }
  if (!isValid(value)) throw new Error(`The setting “${name}” must be ${wanted}.`);
  return value;
}
