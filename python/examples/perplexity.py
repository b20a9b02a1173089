"""How well a model predicts a text: python perplexity.py [MODEL] [TEXT]"""

import math
import sys

import ridge

model = ridge.Model(sys.argv[1] if len(sys.argv) > 1 else None)
text = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time, there was a little girl named Lily."
scores = [score for _, score in model.score(text)]
print(f"{len(scores)} tokens, perplexity {math.exp(-sum(scores) / len(scores)):.3f}")
