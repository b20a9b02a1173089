// Requests that fit the context, and server-sent events of a response as the values that their data are.

/** The request with at most as many tokens as the context has room for: the server refuses to generate fewer than asked for. */
export async function withinContext(body, options) {
  if (body.max_tokens === undefined) return body;
  const { prompt, messages } = body;
  const text = JSON.stringify(messages ? { messages } : { prompt });
  const response = await fetch("/tokenize", { method: "POST", ...options, body: text });
  // What is wrong with the text is said where it is submitted.
  if (!response.ok) return body;
  const { count, max_model_len: context } = await response.json();
  return count < context ? { ...body, max_tokens: Math.min(body.max_tokens, context - count) } : body;
}

/** Yields each event's JSON value until `[DONE]`; throws what the server says is wrong. */
export async function* events(response) {
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the response was interrupted");
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const lines = held.slice(0, end).split("\n");
      held = held.slice(end + 2);
      const data = lines.filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** An error with what the server said, and its code. */
async function refusal(response) {
  const text = await response.text();
  try {
    const { message, code } = JSON.parse(text).error;
    return Object.assign(new Error(message), { code });
  } catch {
    return new Error(`${response.status} ${response.statusText} ${text.slice(0, 200)}`);
  }
}
