"""Settings: `name = value` at the top of a script, changed by config files and by --name=value."""
import ast
import contextlib
import difflib
import os
import re
import symtable
import sys


def refuse(message):
    """End the program: one sentence on stderr (from one process of each machine), exit status 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{os.path.basename(sys.argv[0])}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def refusing(what):
    """Errors of the block end the program, as `what` and the error's words in one line."""
    try:
        yield
    except Exception as e:
        refuse(f"{what}: {str(e)[:400] or type(e).__name__}")


def names(settings):
    """The settings among a script's globals: lower-case names of a bool, int, float or str."""
    return [k for k, v in settings.items()
            if k.islower() and k[0] != "_" and type(v) in (bool, int, float, str)]


def configure(settings, argv=None):
    """Apply `config/file.py` and `--name=value` arguments, in order, to the globals of a script.

    A value fits where turning it into the default's type changes nothing: 1 fits a float and 1e3
    an int, 2.5 and True do not. A file is plain Python, run in a namespace of its own that starts
    as the settings so far; what it assigns are settings, but for functions and names with a
    leading underscore. Returns {name: value} of what was set. Anything that does not fit ends the
    program in one line, before any work.
    """
    argv, known, given = sys.argv[1:] if argv is None else argv, names(settings), {}
    changes = [arg for arg in argv if arg not in ("-h", "--help")]

    def take(name, value, source):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "--help lists them"
            refuse(f"{source}: there is no setting '{name}', {hint}")
        kind = type(settings[name])
        fits = type(value) is kind
        if kind in (int, float):  # abs() < 1e300 leaves out inf and nan
            fits = type(value) in (int, float) and abs(value) < 1e300 and kind(value) == value
        elif fits and kind is str:  # neither NUL nor bytes that were no UTF-8
            fits = not re.search("[\0\ud800-\udfff]", value)
        if not fits:
            refuse(f"{source}: {name} must be of type {kind.__name__}, not {value!r}")
        settings[name] = given[name] = kind(value)

    for arg in changes:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            if not arg.endswith(".py"):
                refuse(f"{arg}: a config file ends in .py, and a setting is --name=value")
            space = {k: settings[k] for k in known}
            with refusing(f"cannot use the config file '{arg}'"):
                with open(arg, encoding="utf-8-sig") as f:
                    text = f.read()
                exec(compile(text, arg, "exec"), space)
            symbols = symtable.symtable(text, arg, "exec").get_symbols()
            assigned = {s.get_name() for s in symbols if s.is_assigned()}
            for name, value in space.items():
                changed = name in known and value is not settings[name]  # also by an import *
                if (name in assigned or changed) and name[0] != "_" and not callable(value):
                    take(name, value, arg)
        elif not equals:
            refuse(f"{arg}: give it a value, {arg}=VALUE")
        else:
            if type(settings.get(name)) in (bool, int, float):
                with contextlib.suppress(Exception):  # it stays a str, which take() refuses
                    value = ast.literal_eval(value)
            take(name, value, arg)
    if len(changes) < len(argv):
        show(settings)
    return given


def show(settings):
    """Print the settings with their values and the comments of the script, and end."""
    script = settings["__file__"]
    lines = [f"python {os.path.basename(script)} [config/FILE.py ...] [--name=value ...]"]
    with open(script, encoding="utf-8") as f:
        for name, comment in re.findall(r"^(\w+) = [^#\n]*(?:# (.*))?$", f.read(), re.MULTILINE):
            if name in names(settings):
                lines.append(f"--{name}={settings[name]}".ljust(36) + f" {comment}")
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # as of `--help | head`
        os._exit(0)
    raise SystemExit(0)
