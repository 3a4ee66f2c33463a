// SPDX-License-Identifier: Apache-2.0
//
// A machine for tests of sandboxes: a converted image with busybox, a state directory, a launcher.
#ifndef LAMINA_TESTS_BACKENDS_SANDBOX_TESTING_H_
#define LAMINA_TESTS_BACKENDS_SANDBOX_TESTING_H_

#include <set>
#include <string>
#include <vector>

#include "backends/launcher.h"
#include "chunkstore/base/file.h"

namespace lamina::backends {

// Factor for the counts of tests that repeat things: LAMINA_SOAK, or 1.
int Repetitions(int count);

class TestMachine {
 public:
  // Converts the image. Throws if that fails.
  TestMachine();
  // Removes the sandboxes and snapshots that the test left.
  ~TestMachine();

  Launcher& launcher() { return launcher_; }
  const LauncherOptions& options() const { return options_; }
  std::string image() const { return "oci:" + directory_.path() + "/image:test"; }
  std::string path(const std::string& name) const { return directory_.path() + "/" + name; }

  // What there is of sandboxes on the machine that is not the kernel's business alone: directories,
  // mounts, control groups, processes in them, loop devices. Empty if nothing was left. Control
  // groups that were there before this object do not count.
  std::vector<std::string> Leftovers() const;

 private:
  TemporaryDirectory directory_;
  LauncherOptions options_;
  Launcher launcher_;
  std::set<std::string> others_;  // control groups of sandboxes that were there before
};

}  // namespace lamina::backends

#endif  // LAMINA_TESTS_BACKENDS_SANDBOX_TESTING_H_
