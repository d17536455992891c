"""What pyproject.toml cannot say: the CPU kernels. One library, built for several instruction sets, and optional.

Without a C++ compiler the build goes on, the torch forms serve, and `kvgroups doctor` says so.
"""

import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NAME = "kvgroups.kernels._cpu"
HEADERS = "kvgroups/kernels/cpu"
SOURCES = [*sorted(glob(f"{HEADERS}/*.cpp")), *sorted(glob("kernels/*/cpu.cpp"))]
SIMD_SOURCES = sorted(glob("kernels/*/cpu_simd.cpp"))
"""Compiled once for each instruction set, which is their namespace."""

# No -ffast-math: NaN and infinity mean something here.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi", f"-I{HEADERS}"]
INSTRUCTION_SETS = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
    },
    "aarch64": {"neon": []},
    "arm64": {"neon": []},
}


def instruction_sets():
    """Instruction set -> compiler flags, for the machine that is built for; empty where there is no kernel."""
    system, _, machine = sysconfig.get_platform().rpartition("-")
    return INSTRUCTION_SETS.get(machine, {}) if system.startswith(("linux", "macosx")) else {}


def units():
    """What is compiled: a source, its object's folder, and flags. Large ones first, so that none is waited for alone."""
    found = [(source, "base", FLAGS) for source in SOURCES]
    for name, flags in instruction_sets().items():
        found += [(source, name, [*FLAGS, f"-DKVGROUPS_ISA={name}", *flags]) for source in SIMD_SOURCES]
    return sorted(found, key=lambda unit: os.path.getsize(unit[0]), reverse=True)


def remove(path):
    if os.path.exists(path):
        os.remove(path)


class BuildKernels(build_ext):
    """A plain shared library: it knows no Python, so its name carries no Python version."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self):
        if self.inplace or self.editable_mode:
            remove(self.get_ext_filename(NAME))
        super().run()

    def build_extension(self, extension):
        """Compile on as many CPUs as `--parallel` says or there are. If that fails no older library is left behind."""
        path = self.get_ext_fullpath(extension.name)
        remove(path)
        num_workers = os.cpu_count() if self.parallel is True else self.parallel or os.cpu_count()
        with ThreadPoolExecutor(num_workers) as pool:
            objects = [object for objects in pool.map(self.compile_unit, units()) for object in objects]
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.compiler.link_shared_object(objects, path, target_lang="c++")

    def compile_unit(self, unit):
        source, folder, flags = unit
        return self.compiler.compile([source], os.path.join(self.build_temp, folder), extra_postargs=flags)


class TaggedWheel(bdist_wheel):
    """Belongs to a platform only if the library is in it, and to no version of Python."""

    def run(self):
        self.run_command("build_ext")
        if not all(map(os.path.exists, self.get_finalized_command("build_ext").get_outputs())):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()

    def get_tag(self):
        return ("py3", "none", "any" if self.root_is_pure else super().get_tag()[2])


setup(
    ext_modules=[Extension(NAME, SOURCES + SIMD_SOURCES, language="c++", optional=True)] if instruction_sets() else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": TaggedWheel},
)
