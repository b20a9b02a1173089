"""Which sentence is nearest to the first: python similarity.py [MODEL]"""

import sys

import ridge

texts = ["The cat sat.", "A cat was sitting.", "She loved to play outside in the park."]
rows = ridge.Embedder(sys.argv[1] if len(sys.argv) > 1 else None, normalize=True).embed(texts).tolist()
for text, row in zip(texts[1:], rows[1:]):
    print(f"{sum(a * b for a, b in zip(rows[0], row)):.3f}  {text}")
