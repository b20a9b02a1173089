"""Continues a text as it is generated: python generate.py [MODEL] [PROMPT]"""

import sys

import ridge

model = ridge.Model(sys.argv[1] if len(sys.argv) > 1 else None)
prompt = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"
print(prompt, end="")
for text in model.stream(prompt, max_tokens=40, temperature=0):
    print(text, end="", flush=True)
print()
