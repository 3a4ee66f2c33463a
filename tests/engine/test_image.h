// SPDX-License-Identifier: Apache-2.0
//
// A small converted image in a directory of its own, for tests that mount one.
#ifndef LAMINA_TESTS_ENGINE_TEST_IMAGE_H_
#define LAMINA_TESTS_ENGINE_TEST_IMAGE_H_

#include <string>

#include "chunkstore/base/file.h"

namespace lamina::fs {

// Everything below one temporary directory:
//   image/   OCI layout with the converted image    state/   for an engine
//   mnt/     an empty directory to mount on
// The image has the symbolic links lower and root to mnt-outside/, which is not there.
class TestImage {
 public:
  TestImage();

  std::string reference() const { return "oci:" + directory_.path() + "/image:test"; }
  std::string layout() const { return directory_.path() + "/image"; }
  std::string state() const { return directory_.path() + "/state"; }
  std::string mountpoint() const { return directory_.path() + "/mnt"; }
  // Of hello.txt, and of data.bin, which spans several frames.
  const std::string& hello() const { return hello_; }
  const std::string& data() const { return data_; }

 private:
  TemporaryDirectory directory_;
  std::string hello_ = "hello\n";
  std::string data_;
};

// The whole file, or "" with a test failure.
std::string Slurp(const std::string& path);

}  // namespace lamina::fs

#endif  // LAMINA_TESTS_ENGINE_TEST_IMAGE_H_
