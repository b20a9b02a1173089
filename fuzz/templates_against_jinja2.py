"""Compares Ridge's chat templates with jinja2's on random ones: python3 fuzz/templates_against_jinja2.py [CASES] [SEED]

Needs jinja2; builds `cargo run -p ridge-text --example render_templates`. The environment is that of transformers'
apply_chat_template. A case is a difference where both render and the texts differ, or where jinja2 renders and Ridge
fails other than by saying that something is not supported; what jinja2 refuses, Ridge must refuse. Prints the
shortest differences and ends with 1 if there are any.
"""

import collections
import copy
import json
import pathlib
import random
import subprocess
import sys
import warnings

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = {
    "s": "Hello, <b>wörld</b> & 'more'\n", "t": "a,b,,c", "e": "", "u": "  Padded\tText  ",
    "i": 7, "n": -3, "z": 0, "f": 2.5, "g": -0.125, "yes": True, "no": False, "none": None,
    "l": [3, 1, 2], "w": ["b", "A", "c", "a"], "m": [], "x": ["<", 1, None, 2.0, True],
    "d": {"b": 1, "a": "x<y", "items": [1, 2]}, "k": {}, "rows": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "n": 2},
        {"role": "user", "content": [{"type": "text", "text": "there"}]}],
}
NAMES = list(DATA) + ["missing"]
FILTERS = [
    "abs", "capitalize", "count", "default('D')", "default('D', true)", "dictsort", "e", "escape", "first", "float",
    "int", "items", "join", "join(', ')", "join('<')", "last", "length", "list", "lower", "max", "min", "reverse",
    "round", "round(1)", "safe", "sort", "sort(reverse=true)", "string", "sum", "title", "tojson", "tojson(indent=2)",
    "trim", "trim('a')", "truncate(8)", "unique", "upper", "wordcount", "replace('a', '<')", "replace('b', 'bb', 1)",
    "indent(2)", "indent(2, true)", "map('upper')", "map(attribute='role')", "map(attribute='n', default=0)",
    "select", "reject", "select('string')", "selectattr('content')", "selectattr('role', 'equalto', 'user')",
    "rejectattr('role', 'equalto', 'user')", "batch(2)", "slice(2)", "format(1)", "center(9)", "groupby('role')",
]
TESTS = [
    "defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "mapping", "iterable",
    "sequence", "callable", "odd", "even", "divisibleby(3)", "true", "false", "in(l)", "in(w)", "equalto(7)", "lower",
    "upper", "escaped", "sameas(none)", "gt(2)", "lt('b')",
]
METHODS = [
    "upper()", "lower()", "strip()", "lstrip()", "rstrip()", "strip('a ')", "title()", "capitalize()", "split()",
    "split(',')", "split(',', 1)", "rsplit(',', 1)", "splitlines()", "replace('a', '<')", "startswith('H')",
    "endswith(('c', 'd'))", "find('b')", "count('l')", "join(w)", "isdigit()", "isalpha()", "items()", "keys()",
    "values()", "get('a')", "get('q', 5)", "index(1)", "count(1)", "copy()", "items", "upper", "get", "append", "foo",
    "items.foo", "upper.type", "role", "a", "content", "format(1, k=2)", "removeprefix('H')", "zfill(9)", "swapcase()",
    "partition(',')", "__class__",
]
BINARY = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "and", "or", "in", "not in"]


# Ridge refuses where jinja2 does not: it folds a slice of a constant that has none to undefined when it compiles, and
# `batch` and `slice` of what cannot be iterated fail only when somebody looks at them.
KNOWN = ["object is not subscriptable", "unhashable type: 'slice'", "object is not iterable"]


class Random:
    def __init__(self, seed):
        self.r = random.Random(seed)

    def of(self, things):
        return self.r.choice(things)

    def literal(self):
        return self.of(["1", "0", "2", "-1", "1.5", "'a'", "'<i>'", "\"it's\"", "''", "true", "none", "[1, 'a']", "(1, 2)",
                        "{'a': 1}", "[]", "'%s'", "'x=%d'", "range(3)", "'a' 'b'"])

    def expr(self, depth):
        if depth == 0:
            return self.of(NAMES) if self.r.random() < 0.75 else self.literal()
        kind = self.r.random()
        a = self.expr(depth - 1)
        if kind < 0.30:
            return f"({a})|{self.of(FILTERS)}"
        if kind < 0.50:
            return f"({a}).{self.of(METHODS)}"
        if kind < 0.75:
            return f"({a}) {self.of(BINARY)} ({self.expr(depth - 1)})"
        if kind < 0.83:
            return f"({a}) is {self.of(['', 'not '])}{self.of(TESTS)}"
        if kind < 0.90:
            index = self.of(["0", "-1", "1:", ":2", "::-1", "'a'", "1:-1", "'role'", "5", "::2"])
            return f"({a})[{index}]"
        if kind < 0.94:
            return f"({a}) if ({self.expr(0)}) else ({self.expr(depth - 1)})"
        if kind < 0.97:
            return f"not ({a})"
        return f"[{a}, {self.expr(0)}]"

    def block(self, depth):
        space = lambda: self.of(["", "", "-"])
        kind = self.r.random()
        if depth == 0 or kind < 0.5:
            return "{{" + space() + f" {self.expr(self.of([0, 1, 1, 2, 2, 3]))} " + space() + "}}"
        inner = "".join(self.of(["", " x ", "\n", "\n  "]) + self.block(depth - 1) for _ in range(self.of([1, 1, 2])))
        open, close = "{%" + space() + " ", " " + space() + "%}"
        if kind < 0.65:
            return f"{open}if {self.expr(1)}{close}{inner}{open}else{close}-{open}endif{close}"
        if kind < 0.85:
            loop = self.of(["{{ loop.index }}", "{{ v }}", "{{ loop.last }}{{ loop.length }}", "{{ loop.previtem }}",
                            "{% if loop.index > 2 %}{% break %}{% endif %}", "{{ loop.cycle('a', 'b') }}"])
            guard = self.of(["", "", " if v"])
            return f"{open}for v in {self.expr(1)}{guard}{close}{loop}{inner}{open}else{close}none{open}endfor{close}"
        if kind < 0.92:
            name = self.of(["q", "s", "i"])
            return f"{open}set {name} = {self.expr(1)}{close}{{{{ {name} }}}}{inner}"
        if kind < 0.96:
            return f"{open}macro f(a, b=2){close}{{{{ a }}}}|{{{{ b }}}}{open}endmacro{close}{{{{ f({self.expr(1)}) }}}}"
        return f"{open}set o = namespace(c=0){close}{open}for v in l{close}{open}set o.c = o.c + v{close}{open}endfor{close}{{{{ o.c }}}}"

    def template(self):
        return "".join(self.of(["", "a ", "\n"]) + self.block(2) for _ in range(self.of([1, 1, 1, 2])))


def environment():
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    return env


def main(cases=20000, seed=0):
    warnings.simplefilter("ignore", SyntaxWarning)
    make, env = Random(seed), environment()
    templates = [make.template() for _ in range(cases)]
    lines = "".join(json.dumps({"template": t, "variables": DATA}) + "\n" for t in templates)
    command = ["cargo", "run", "-q", "-p", "ridge-text", "--example", "render_templates"]
    ours = subprocess.run(command, cwd=ROOT, input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(ours) == len(templates)
    found, unsupported, texts, errors, known = [], collections.Counter(), 0, 0, 0
    for template, line in zip(templates, ours):
        mine = json.loads(line)
        try:
            theirs = {"text": env.from_string(template).render(**copy.deepcopy(DATA), messages=[{"role": "user"}])}
        except Exception as error:  # jinja2 lets Python's own errors through
            theirs = {"error": f"{type(error).__name__}: {error}"}
        texts, errors = texts + ("text" in theirs), errors + ("error" in theirs)
        if mine.get("text") == theirs.get("text"):
            continue
        if "error" in mine and "text" in theirs and any(known in mine["error"] for known in KNOWN):
            known += 1
        elif "error" in mine and " not supported" in mine["error"]:
            unsupported[mine["error"].split(": ", 1)[-1].split(" is not supported")[0].split(" are not")[0]] += 1
        elif " at 0x" not in theirs.get("text", ""):
            found.append((template, mine, theirs))
    print(f"{cases} templates: jinja2 renders {texts} and refuses {errors}; {len(found)} differ, {known} in known ways")
    for what, count in unsupported.most_common(15):
        print(f"  not supported {count} times: {what[:100]}")
    for template, mine, theirs in sorted(found, key=lambda case: len(case[0]))[:25]:
        print(json.dumps(template), "\n    ridge ", json.dumps(mine)[:300], "\n    jinja2", json.dumps(theirs)[:300])
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
