"""The official openai client against a running `ridge serve`, end to end.

Usage: python openai_client.py URL EMBEDDINGS_URL, with servers of the embedded model (and a template that knows tools) and
of an encoder. Prints a line for each thing that held; the first that does not ends it with a traceback.
"""

import json
import sys

import openai

url, embeddings_url = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0)
MODEL = client.models.list().data[0].id
PROMPT = "Once upon a time"


def held(what):
    print("held:", what, flush=True)


# Completions: whole, streamed, with usage and log-probabilities.
whole = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=16, logprobs=2)
assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 16
assert "".join(whole.choices[0].logprobs.tokens) == whole.choices[0].text
stream = client.completions.create(
    model=MODEL, prompt=PROMPT, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
held("completions")

several = client.completions.create(model=MODEL, prompt=[PROMPT, "The cat"], n=2, temperature=1, seed=3, max_tokens=8)
assert [c.index for c in several.choices] == [0, 1, 2, 3]
held("several prompts and answers")

# Chats.
messages = [{"role": "user", "content": PROMPT}]
whole = client.chat.completions.create(
    model=MODEL, messages=messages, temperature=0, max_completion_tokens=12, logprobs=True, top_logprobs=2
)
assert whole.choices[0].message.role == "assistant"
assert len(whole.choices[0].logprobs.content) == 12
chunks = client.chat.completions.create(
    model=MODEL, messages=messages, temperature=0, max_completion_tokens=12, stream=True
)
said = "".join(c.choices[0].delta.content or "" for c in chunks)
assert said == whole.choices[0].message.content
held("chats")

stopped = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=40, stop=["."])
assert stopped.choices[0].finish_reason == "stop" and "." not in stopped.choices[0].message.content
# The client's own reader of streams refuses answers that are cut by length.
with client.chat.completions.stream(model=MODEL, messages=messages, temperature=0, stop=["."]) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion()
assert final.choices[0].message.content == stopped.choices[0].message.content
held("stop strings")

extended = client.chat.completions.create(
    model=MODEL, messages=messages, temperature=1, seed=1, max_tokens=5,
    extra_body={"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 5},
)
assert extended.usage.completion_tokens == 5
held("vLLM's extensions")

# Forms.
formed = client.chat.completions.create(
    model=MODEL, messages=messages, temperature=1, seed=1, max_tokens=200,
    response_format={
        "type": "json_schema",
        "json_schema": {
            "name": "size",
            "schema": {
                "type": "object",
                "properties": {"big": {"type": "boolean"}, "colour": {"enum": ["red", "blue"]}},
                "required": ["big", "colour"],
                "additionalProperties": False,
            },
        },
    },
)
value = json.loads(formed.choices[0].message.content)
assert set(value) == {"big", "colour"} and value["colour"] in ("red", "blue"), value
held("JSON of a schema")

# Tools: called, streamed, named.
tools = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "type": "object",
                "properties": {"colour": {"enum": ["red", "blue"]}},
                "required": ["colour"],
                "additionalProperties": False,
            },
        },
    }
]
called = client.chat.completions.create(
    model=MODEL, messages=messages, tools=tools, tool_choice="required", temperature=1, seed=2, max_tokens=300,
    parallel_tool_calls=False,
)
assert called.choices[0].finish_reason == "tool_calls", called
[call] = called.choices[0].message.tool_calls
assert call.function.name == "paint" and json.loads(call.function.arguments)["colour"] in ("red", "blue")
named = {"type": "function", "function": {"name": "paint"}}
with client.chat.completions.stream(
    model=MODEL, messages=messages, tools=tools, tool_choice=named, temperature=1, seed=2, max_tokens=300
) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion()
[call] = final.choices[0].message.tool_calls
assert call.function.name == "paint" and json.loads(call.function.arguments)["colour"] in ("red", "blue")
replied = messages + [
    {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "paint", "arguments": call.function.arguments}}]},
    {"role": "tool", "tool_call_id": call.id, "content": "done"},
]
assert client.chat.completions.create(model=MODEL, messages=replied, tools=tools, max_tokens=3).choices
held("tools")

# Errors are the client's own types, and name the parameter.
for make, kind, param in [
    (lambda: client.completions.create(model=MODEL, prompt=PROMPT, top_p=7), openai.BadRequestError, "top_p"),
    (lambda: client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"beam": 2}), openai.BadRequestError, "beam"),
    (lambda: client.completions.create(model="gpt-4", prompt=PROMPT), openai.NotFoundError, "model"),
    (lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list(), openai.AuthenticationError, None),
]:
    try:
        make()
    except kind as error:
        assert error.param == param, (error, error.param)
    else:
        raise AssertionError(f"no {kind}")
held("errors")

# Embeddings, which the client asks for in base64.
embedder = openai.OpenAI(base_url=f"{embeddings_url}/v1", api_key="none", max_retries=0)
name = embedder.models.list().data[0].id
vectors = embedder.embeddings.create(model=name, input=[[5, 6, 7], [8]])
floats = embedder.embeddings.create(model=name, input=[[5, 6, 7], [8]], encoding_format="float")
assert len(vectors.data) == 2 and vectors.usage.prompt_tokens == 4
for a, b in zip(vectors.data, floats.data):
    assert all(abs(x - y) < 1e-6 for x, y in zip(a.embedding, b.embedding)) and len(a.embedding) > 8
held("embeddings")
print("all held")
