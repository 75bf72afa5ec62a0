"""`find` on tiny packages: every way in which a module can come to have a name."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_plugins.source import Definition, Missing, elsewhere, find, lacks, scopes

Write = Callable[[dict[str, str]], None]
Find = Callable[[str], Definition]
Gone = Callable[[str], Missing]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    return write


@pytest.fixture
def look(tmp_path: Path) -> Find:
    return lambda target: find(target, [tmp_path])


@pytest.fixture
def missing(tmp_path: Path) -> Gone:
    def missing(target: str) -> Missing:
        with pytest.raises(Missing) as caught:
            find(target, [tmp_path])
        return caught.value

    return missing


def test_a_function_and_all_that_is_known_of_it(write: Write, look: Find, tmp_path: Path) -> None:
    write(
        {
            "pkg/__init__.py": "",
            "pkg/a.py": """\
            @cache
            @other(1)
            def f(a, /, b, c=1, *args, d, e=None, **rest):
                pass
            """,
        }
    )
    found = look("pkg.a:f")
    assert (found.target, found.file, found.line, found.kind) == (
        "pkg.a:f",
        tmp_path / "pkg/a.py",
        3,
        "function",
    )
    assert found.decorators == ("cache", "other(1)")
    assert found.parameters is not None
    assert [str(p) for p in found.parameters] == ["a", "b", "c=1", "*args", "d", "e=None", "**rest"]
    assert [p.kind for p in found.parameters] == [
        "positional only",
        "positional or keyword",
        "positional or keyword",
        "var positional",
        "keyword only",
        "keyword only",
        "var keyword",
    ]
    assert [p.default for p in found.parameters] == [None, None, "1", None, None, "None", None]


def test_accepts_a_keyword(write: Write, look: Find) -> None:
    write(
        {
            "m.py": """\
            def narrow(a, /, b): ...
            def wide(**k): ...
            made = maker()
            """
        }
    )
    narrow = look("m:narrow")
    assert (narrow.accepts("a"), narrow.accepts("b"), narrow.accepts("c")) == (False, True, False)
    assert look("m:wide").accepts("anything") is True
    assert look("m:made").accepts("anything") is None


@pytest.mark.parametrize(
    ("target", "line", "kind"),
    [
        ("m", 1, "module"),
        ("m:C", 1, "class"),
        ("m:C.method", 2, "function"),
        ("m:C.Inner.deep", 4, "async function"),
        ("m:C.size", 5, "constant"),
        ("m:a", 6, "constant"),
        ("m:b", 6, "constant"),
        ("m:rest", 6, "constant"),
        ("m:annotated", 7, "constant"),
        ("m:opened", 8, "constant"),
        ("m:inside", 9, "function"),
        ("m:i", 10, "constant"),
        ("m:looped", 11, "constant"),
        ("m:walrus", 12, "constant"),
        ("m:in_if", 13, "constant"),
        ("m:in_case", 16, "constant"),
    ],
)
def test_every_statement_that_binds(write: Write, look: Find, target: str, line: int, kind: str) -> None:
    write(
        {
            "m.py": """\
            class C:
                def method(self): ...
                class Inner:
                    async def deep(self): ...
                size = 1
            a, (b, *rest) = 1, (2, 3)
            annotated: int = 1
            with open("x") as opened:
                def inside(): ...
            for i in range(2):
                looped = i + 1
            if walrus := 1:
                in_if = 1
            match a:
                case 1:
                    in_case = 1
            """
        }
    )
    found = look(target)
    assert (found.line, found.kind) == (line, kind)


def test_bindings_that_if_and_try_decide(write: Write, look: Find) -> None:
    """The telling one leads; the others are its alternatives."""
    write(
        {
            "m.py": """\
            f = None
            try:
                from not_there import f
            except ImportError:
                if sm120:
                    def f(x, backend="cuda"): ...
                else:
                    f = other()
            """
        }
    )
    found = look("m:f")
    assert (found.line, found.kind) == (6, "function")
    assert [(a.line, a.kind) for a in found.alternatives] == [
        (8, "constant"),
        (3, "import"),
        (1, "constant"),
    ]
    assert found.alternatives[1].value == "not_there:f"


def test_the_last_unconditional_binding_wins(write: Write, look: Find) -> None:
    write({"m.py": "def f(a): ...\ndef f(b): ...\nif x:\n    f = None\n"})
    found = look("m:f")
    assert found.line == 2
    assert [a.line for a in found.alternatives] == [4]


def test_a_class_rebuilt_from_itself_is_still_that_class(write: Write, look: Find, missing: Gone) -> None:
    """SGLang 0.5.20 passes `ServerArgs` through `msgspec.defstruct` under the same name."""
    write({"m.py": "class Args:\n    def check(self): ...\nArgs = struct('Args', vars(Args))\n"})
    assert look("m:Args").line == 1
    assert look("m:Args.check").line == 2
    gone = missing("m:Args.tp_size")
    assert not gone.certain


def test_version_and_typing_branches_are_decided(write: Write, look: Find, missing: Gone) -> None:
    write(
        {
            "m.py": """\
            import sys
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from elsewhere import Only
            else:
                real = 1
            if sys.version_info >= (3, 8):
                def f(new): ...
            else:
                def f(old): ...
            if __name__ == "__main__":
                script = 1
            """
        }
    )
    assert look("m:f").line == 8
    assert look("m:f").alternatives == ()
    assert look("m:real").line == 6
    assert "type checkers only" in str(missing("m:Only"))
    missing("m:script")


def test_property_setters_do_not_hide_the_getter(write: Write, look: Find) -> None:
    write({"m.py": "class C:\n    @property\n    def p(self): ...\n    @p.setter\n    def p(self, v): ...\n"})
    assert look("m:C.p").line == 3
    assert look("m:C.p").decorators == ("property",)


def test_deleted_names_are_gone(write: Write, missing: Gone) -> None:
    write({"m.py": "x = 1\ndel x\n"})
    missing("m:x")


@pytest.mark.parametrize(
    "statement",
    [
        "from pkg.deep.real import f",
        "from .deep.real import f",
        "from .deep import f",
        "from .deep import g as f",
        "from .deep import *",
        "from .deep.real import *",
        "import pkg.deep.real\nf = pkg.deep.real.f",
        "import pkg.deep.real as r\nf = r.f",
        "from .deep import real\nf = real.f",
    ],
)
def test_re_exports_lead_to_the_definition(write: Write, look: Find, statement: str) -> None:
    write(
        {
            "pkg/__init__.py": statement + "\n",
            "pkg/deep/__init__.py": "from .real import f\nfrom ..deep.real import f as g\n",
            "pkg/deep/real.py": "\ndef f(x): ...\n",
        }
    )
    found = look("pkg:f")
    assert (found.target, found.line) == ("pkg.deep.real:f", 2)
    assert found.through[0].name == "f"
    assert found.through[0].module == "pkg"


def test_star_imports_honour_all(write: Write, look: Find, missing: Gone) -> None:
    write(
        {
            "p/__init__.py": "from .listed import *\nfrom .plain import *\n",
            "p/listed.py": "__all__ = ['a'] + ['_b']\n__all__ += ['c']\na = _b = c = d = 1\n",
            "p/plain.py": "e = 1\n_f = 1\n",
        }
    )
    for name in ("a", "_b", "c", "e"):
        assert look(f"p:{name}").kind == "constant"
    for name in ("d", "_f"):
        missing(f"p:{name}")


def test_submodules_are_attributes_of_their_package(write: Write, look: Find) -> None:
    write({"p/__init__.py": "from . import a as a\n", "p/a.py": "def f(): ...\n", "p/b.py": "x = 1\n"})
    assert look("p:a.f").target == "p.a:f"
    assert look("p:b.x").target == "p.b:x"
    assert look("p:b").kind == "module"


def test_a_name_that_hides_its_submodule(write: Write, look: Find) -> None:
    write({"p/__init__.py": "from .f import f\n", "p/f.py": "def f(x): ...\n"})
    assert look("p:f").kind == "function"


def test_circular_imports_end(write: Write, missing: Gone) -> None:
    write({"p/__init__.py": "", "p/a.py": "from .b import x\n", "p/b.py": "from .a import x\n"})
    missing("p.a:x")


def test_inherited_methods(write: Write, look: Find) -> None:
    write(
        {
            "p/__init__.py": "",
            "p/base.py": "class Far:\n    def far(self): ...\n\nclass Base(Far):\n    def near(self): ...\n",
            "p/m.py": """\
            from p import base
            from .base import Base as B
            class Mixin:
                def near(self): ...
            class C(B, Generic[T]):
                alias = B.near
            class D(Mixin, base.Base): ...
            class Loop(Loop): ...
            """,
        }
    )
    assert look("p.m:C.near").target == "p.base:Base.near"
    assert look("p.m:C.far").target == "p.base:Far.far"
    assert look("p.m:C.alias").target == "p.base:Base.near"
    assert look("p.m:D.near").target == "p.m:Mixin.near"
    assert [h.how for h in look("p.m:C.near").through] == ["base class"]


def test_a_diamond_takes_the_nearer_side(write: Write, look: Find) -> None:
    write(
        {
            "m.py": """\
            class A:
                def f(self): ...
            class B(A): ...
            class C(A):
                def f(self): ...
            class D(B, C): ...
            """
        }
    )
    assert look("m:D.f").target == "m:C.f"


def test_class_parameters_are_those_of_init(write: Write, look: Find) -> None:
    write({"m.py": "class C:\n    def __init__(self, a, b=1): ...\n@dataclass\nclass D:\n    x: int\n"})
    assert [str(p) for p in look("m:C").parameters or ()] == ["a", "b=1"]
    assert look("m:D").parameters is None
    assert look("m:D.__init__").kind == "generated"


# --- what is not there ---


def test_nothing_installed(missing: Gone) -> None:
    gone = missing("no_such:f")
    assert (gone.part, gone.certain) == ("package", True)
    assert str(gone) == "package `no_such` is not installed"


def test_a_missing_module_names_its_neighbours(write: Write, missing: Gone) -> None:
    write({"p/__init__.py": "", "p/runner.py": ""})
    assert str(missing("p.runer:f")) == "`p` has no module `runer`; did you mean `p.runner`?"


def test_a_missing_attribute_says_how_far_it_got(write: Write, missing: Gone, tmp_path: Path) -> None:
    write({"m.py": "class Runner:\n    def load_model(self): ...\n"})
    assert str(missing("m:Runner.load_modle")) == (
        f"`m:Runner` ({tmp_path}/m.py:1) has no `load_modle`; did you mean `load_model`?"
    )
    assert "did you mean `Runner.load_model`?" in str(missing("m:load_model"))
    assert "did you mean `Runner`?" in str(missing("m:Runer.load_model"))


@pytest.mark.parametrize("target", ["m:inner", "m:outer.inner"])
def test_a_local_is_named_as_one(write: Write, missing: Gone, target: str) -> None:
    write({"m.py": "def outer():\n    def inner(): ...\n    return inner\n"})
    gone = missing(target)
    assert gone.certain
    assert "`inner` is a local of `outer`: it does not exist until `outer` runs; patch `outer` itself" in gone.note


def test_instance_attributes_annotations_and_globals(write: Write, missing: Gone) -> None:
    write(
        {
            "m.py": """\
            class C:
                field: int
                def __init__(self):
                    self.model = 1
            def start():
                global handle
                handle = 1
            """
        }
    )
    assert "set on instances by `C.__init__`" in str(missing("m:C.model"))
    assert "only annotates it" in str(missing("m:C.field"))
    assert "`start` sets it as a global" in str(missing("m:handle"))


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("def __getattr__(name): ...\n", "m:x"),
        ("from not_there import *\n", "m:x"),
        ("from not_there import Base\nclass C(Base): ...\n", "m:C.x"),
        ("x = make()\n", "m:x.y"),
        ("import not_there as x\n", "m:x.y"),
        ("@cache\ndef x(): ...\n", "m:x.cache_clear"),
        ("class C: ...\n", "m:C.__repr__"),
        ("def broken(:\n", "m:broken"),
    ],
)
def test_what_only_running_it_can_tell_is_not_certain(write: Write, missing: Gone, text: str, target: str) -> None:
    write({"m.py": text})
    gone = missing(target)
    assert not gone.certain


def test_compiled_modules_are_not_certain(write: Write, missing: Gone, look: Find, tmp_path: Path) -> None:
    from importlib.machinery import EXTENSION_SUFFIXES

    write({"p/__init__.py": "from ._c import f\n"})
    (tmp_path / f"p/_c{EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF")
    gone = missing("p._c:f")
    assert (gone.part, gone.certain) == ("unreadable", False)
    assert (look("p:f").kind, look("p:f").value) == ("import", "p._c:f")


def test_an_import_of_nothing_is_missing(write: Write, missing: Gone) -> None:
    write({"p/__init__.py": "from .a import gone\n", "p/a.py": "x = 1\n"})
    gone = missing("p:gone")
    assert gone.certain


def test_lazy_imports_are_followed(write: Write, look: Find) -> None:
    write(
        {
            "p/__init__.py": "if TYPE_CHECKING:\n    from .a import f\ndef __getattr__(name): ...\n",
            "p/a.py": "def f(): ...\n",
        }
    )
    assert look("p:f").target == "p.a:f"
    assert look("p:f").through[0].how == "lazy import"


@pytest.mark.parametrize("target", ["", "m:", "m:a..b", "m.:a", "m:a-b", "m:f.<locals>.g"])
def test_malformed_targets(target: str) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        find(target)


def test_lacks_names_what_a_patch_relies_on(write: Write, tmp_path: Path) -> None:
    write(
        {
            "m.py": """\
            def f(model, fullgraph=True): ...
            made = make()
            if cond:
                def g(a): ...
            else:
                def g(b): ...
            """
        }
    )
    roots = [tmp_path]
    assert lacks("m:f", ["fullgraph"], roots) is None
    assert lacks("m:f", ["full_graph"], roots) == (
        f"`m:f` ({tmp_path}/m.py:1) does not take `full_graph`; did you mean `fullgraph`?"
    )
    assert lacks("m:made", ["anything"], roots) is None
    assert lacks("m:made.x", [], roots) is None
    assert lacks("m:g", ["a", "b"], roots) is None
    assert lacks("m:f", ["model"], roots, knows=["model", "fullgraph", "dynamic"]) is None
    assert (
        lacks("m:f", [], roots, knows=["model"]) == f"`m:f` ({tmp_path}/m.py:1) takes `fullgraph`, which is not known"
    )
    assert lacks("m:g", [], roots, knows=["b"]) is None
    assert lacks("m:made", [], roots, knows=["b"]) is None
    assert lacks("m:gone", [], roots) == f"`m` ({tmp_path}/m.py) has no `gone`"


def test_elsewhere(write: Write, tmp_path: Path) -> None:
    write({"p/__init__.py": "", "p/x/y.py": "\nclass C:\n    async def moved(self): ...\n"})
    assert elsewhere("moved", "p", [tmp_path]) == ["p/x/y.py:3"]
    assert elsewhere("gone", "p", [tmp_path]) == []


def test_a_file_is_parsed_once_until_it_changes(write: Write, look: Find) -> None:
    write({"m.py": "def f(a): ...\n"})
    look("m:f")
    before = scopes.parse.cache_info().misses
    look("m:f")
    assert scopes.parse.cache_info().misses == before
    write({"m.py": "def f(a, b): ...\n"})
    assert look("m:f").parameter("b") is not None


def test_it_imports_nothing_it_reads(tmp_path: Path) -> None:
    """Found on the interpreter's own path, below a package that would fail if it were imported."""
    package = tmp_path / "explodes"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "inner.py").write_text("from . import nothing\nclass C:\n    def f(self): ...\n")
    code = textwrap.dedent(
        """\
        import sys
        from glm5_plugins.source import find
        print(find("explodes.inner:C.f").line)
        assert not any(name.startswith("explodes") for name in sys.modules)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_a_name_that_goes_on_is_suggested_before_names_that_look_more_alike(write: Write, missing: Gone) -> None:
    write({"m.py": "def fp4_quantize_renamed(): ...\n" + "".join(f"def {p}fp4_quantize(): ...\n" for p in "abcd")})
    assert missing("m:fp4_quantize").suggestions[0] == "fp4_quantize_renamed"
