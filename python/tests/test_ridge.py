"""The module as Python sees it, on the embedded model. Needs the standard library alone."""

import math
import pathlib
import subprocess
import sys
import threading
import time
import unittest

import ridge

STORY = ", there was a little girl named Lily. She"
STORIES = pathlib.Path(__file__).parents[2] / "models" / "stories260K"
GREEDY = {"max_tokens": 12, "temperature": 0}


class Generating(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = ridge.Model()

    def test_a_text_is_continued(self):
        self.assertEqual(self.model.generate("Once upon a time", **GREEDY), STORY)

    def test_a_stream_is_the_text_in_pieces(self):
        pieces = list(self.model.stream("Once upon a time", **GREEDY))
        self.assertGreater(len(pieces), 3)
        self.assertEqual("".join(pieces), STORY)

    def test_a_seed_gives_the_same_text(self):
        texts = {self.model.generate("Once", max_tokens=60, temperature=1.5, seed=seed) for seed in (3, 3, 4)}
        self.assertEqual(len(texts), 2)

    def test_a_dropped_stream_frees_the_model(self):
        stream = self.model.stream("Once upon a time", max_tokens=400, temperature=0)
        next(stream)
        del stream
        self.assertEqual(self.model.generate("Once upon a time", **GREEDY), STORY)

    def test_other_threads_go_on_while_a_model_generates(self):
        ticks, done = [], threading.Event()

        def tick():
            while not done.is_set():
                ticks.append(time.monotonic())
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        self.model.generate("Once upon a time", max_tokens=400, temperature=0)
        done.set()
        thread.join()
        self.assertGreater(len(ticks), 3)

    def test_the_same_model_is_read_from_a_folder_and_cut_over_ranks(self):
        self.assertEqual(ridge.Model(STORIES).generate("Once upon a time", **GREEDY), STORY)
        self.assertEqual(ridge.Model(tensor_parallel=2).generate("Once upon a time", **GREEDY), STORY)

    def test_tokens_are_those_of_the_text(self):
        tokens = self.model.tokenize("Once upon a time")
        self.assertEqual(tokens[0], 1)
        self.assertEqual(self.model.detokenize(self.model.tokenize("Once upon", special=False)).strip(), "Once upon")

    def test_scores_are_log_probabilities(self):
        scores = self.model.score("Once upon a time")
        self.assertEqual([token for token, _ in scores], self.model.tokenize("Once upon a time")[1:])
        self.assertTrue(all(-20 < score <= 0 for _, score in scores))
        self.assertLess(math.exp(-sum(s for _, s in scores) / len(scores)), 10)

    def test_mistakes_raise_errors_of_the_right_kind(self):
        for raises, said, call in [
            (FileNotFoundError, "no such", lambda: ridge.Model("/nowhere")),
            (FileNotFoundError, "ridge pull no/model", lambda: ridge.Model("no/model")),
            (ValueError, "choose cpu, cuda", lambda: ridge.Model(device="tpu")),
            (ValueError, "dtype", lambda: ridge.Model(dtype="int8")),
            (ValueError, "top_p", lambda: self.model.generate("x", top_p=2)),
            (ValueError, "chat template", lambda: self.model.chat([{"role": "user", "content": "Hi"}])),
            (ValueError, "messages must be dicts", lambda: self.model.chat(["Hi"])),
            (TypeError, "", lambda: self.model.generate(3)),
        ]:
            with self.subTest(said), self.assertRaisesRegex(raises, said):
                call()


class Chatting(unittest.TestCase):
    def test_messages_are_rendered_by_the_template(self):
        import shutil
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder) / "model"
            shutil.copytree(STORIES, folder)
            template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
            (folder / "chat_template.jinja").write_text(template)
            model = ridge.Model(folder)
            messages = [{"role": "user", "content": "Once upon a time"}]
            self.assertEqual(model.chat(messages, **GREEDY), STORY)
            self.assertEqual("".join(model.chat_stream(messages, **GREEDY)), STORY)


class Embedding(unittest.TestCase):
    def test_vectors_are_tensors(self):
        tensor = ridge.Embedder(normalize=True).embed(["The cat sat.", "The dog ran."])
        self.assertEqual((tensor.shape, len(tensor)), ((2, 64), 2))
        for row in tensor.tolist():
            self.assertAlmostEqual(sum(x * x for x in row), 1, places=5)

    def test_tensors_are_read_by_dlpack(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        tensor = ridge.Embedder().embed(["The cat sat.", "The dog ran."])
        array = numpy.from_dlpack(tensor)
        expected = tensor.tolist()
        del tensor
        self.assertEqual(array.tolist(), expected)
        # A capsule that nobody takes is freed by itself.
        capsule = ridge.Embedder().embed(["a"]).__dlpack__()
        del capsule


class Planning(unittest.TestCase):
    def test_a_plan_says_what_fits(self):
        plan = ridge.plan_fit(STORIES, device="H100-SXM")
        self.assertTrue(plan["fits"])
        self.assertGreater(plan["sequences"], 1)
        with self.assertRaisesRegex(ValueError, "abacus"):
            ridge.plan_fit(STORIES, device="abacus")


class Examples(unittest.TestCase):
    def test_examples_run(self):
        folder = pathlib.Path(__file__).parents[1] / "examples"
        for name, said in [("generate", STORY), ("perplexity", "perplexity "), ("similarity", "A cat was sitting.")]:
            ran = subprocess.run([sys.executable, folder / f"{name}.py"], capture_output=True, text=True, check=True)
            self.assertIn(said, ran.stdout)


if __name__ == "__main__":
    unittest.main()
