// Requests to the server. Paths are relative, so that the page works below any path of a proxy.

/** An answer that is an error. `status` is 0 if there was no answer or it ended early. */
export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Returns the names of the served model. */
export async function fetchModels(apiKey) {
  const response = await send("v1/models", {}, apiKey);
  const list = await response.json();
  return list.data.map((model) => model.id);
}

/** Returns the text of the metrics. */
export async function fetchMetrics(signal) {
  const response = await send("metrics", { signal }, "");
  return response.text();
}

/** Yields the chunks of a chat completion. */
export async function* streamChat(body, apiKey, signal) {
  const options = {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  };
  const response = await send("v1/chat/completions", options, apiKey);
  let isComplete = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      isComplete = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new RequestError(chunk.error.message, 0);
    }
    yield chunk;
  }
  if (!isComplete) {
    throw new RequestError("The connection ended before the answer.", 0);
  }
}

/** Sends a request, and throws if it is refused. */
async function send(path, options, apiKey) {
  const headers = { ...options.headers };
  if (apiKey) {
    headers.authorization = `Bearer ${apiKey}`;
  }
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new RequestError("The server cannot be reached.", 0);
  }
  if (!response.ok) {
    throw new RequestError(await errorMessage(response), response.status);
  }
  return response;
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** Yields the data of server-sent events, of which each has one line of data. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) {
        return;
      }
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) {
          yield line.slice("data:".length).trim();
        }
      }
    }
  } finally {
    // Closes the connection if the reader of the events has left; else it has ended.
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new RequestError("The connection broke.", 0);
  }
}
