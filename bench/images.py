# SPDX-License-Identifier: Apache-2.0
"""Images of the startup benchmark: what they hold, and the program that is started in each. It prints
"ready" when it has done, or can do, what it is for, and ends."""

import dataclasses

READY = b"ready"
BASE_PACKAGES = ["ca-certificates"]
MODEL = "opt/model/weights.bin"


@dataclasses.dataclass(frozen=True)
class BenchImage:
    name: str
    packages: list[str]
    command: list[str]
    model_bytes: int = 0  # of a file with random bytes, beside the packages


def until(condition: str) -> str:
    return f"until {condition}; do sleep 0.01; done; echo ready"


def shell(script: str) -> list[str]:
    return ["bash", "-ec", script]


IMAGES = [
    BenchImage("python", ["python3-pandas", "python3-scipy"],
               ["python3", "-c", "import pandas, scipy.linalg, numpy\n"
                "print(scipy.linalg.inv(numpy.eye(3)).shape, 'ready')"]),
    BenchImage("node", ["nodejs"],
               ["node", "-e", "const http = require('http');"
                "const s = http.createServer((q, r) => r.end('ready'));"
                "s.listen(8080, () => http.get('http://127.0.0.1:8080', r => {"
                "r.pipe(process.stdout); r.on('end', () => s.close()); }));"]),
    BenchImage("jre", ["openjdk-17-jre-headless", "clojure"],
               ["java", "-cp", "/usr/share/java/clojure.jar:/usr/share/java/spec.alpha.jar:"
                "/usr/share/java/core.specs.alpha.jar", "clojure.main", "-e",
                '(println (reduce + (range 1000)) "ready")']),
    BenchImage("gcc", ["g++"],
               shell("printf '#include <iostream>\\nint main() { std::cout << \"ready\\\\n\"; }' |"
                     " g++ -x c++ - -o /tmp/program; /tmp/program")),
    BenchImage("postgres", ["postgresql"],
               shell("run='setpriv --reuid=postgres --regid=postgres --clear-groups'; cd /tmp;"
                     " bin=$(echo /usr/lib/postgresql/*/bin);"
                     " $run $bin/initdb --no-sync -D /tmp/data >/dev/null;"
                     " $run $bin/pg_ctl -D /tmp/data -o '-k /tmp' -w -l /tmp/log start >/dev/null;"
                     " $run psql -h /tmp -tc \"select 'ready'\" postgres;"
                     " $run $bin/pg_ctl -D /tmp/data -m immediate stop >/dev/null")),
    BenchImage("nginx", ["nginx-light"],
               shell("nginx; " + until("exec 3<>/dev/tcp/127.0.0.1/80") + "; nginx -s stop")),
    BenchImage("redis", ["redis-server"],
               shell("redis-server --daemonize yes --dir /tmp >/dev/null; "
                     + until("redis-cli ping >/dev/null 2>&1") + "; redis-cli shutdown nosave")),
    BenchImage("model", ["python3-numpy"],
               ["python3", "-c", "import numpy\n"
                f"weights = numpy.memmap('/{MODEL}', dtype=numpy.uint8, mode='r')\n"
                "print(int(weights[:64 << 20].sum()), 'ready')"], model_bytes=2900 << 20),
]

