// SPDX-License-Identifier: Apache-2.0
//
// containerd's filters, with which List chooses snapshots:
//
//   filter   := selector ("," selector)*               all must match
//   selector := field ("." field)* [operator value]    without an operator: the field is there
//   operator := "==" | "!=" | "~="                     the last one is a regular expression (RE2)
//   field    := letters, digits and "_", or quoted
//   value    := text up to white space or ",", or quoted
//
// Quoted is a Go string: "...", with \ as in C. Behind "~=" /.../ and |...| are quotes as well.
//
// Fields of a snapshot are name, parent, kind ("active", "view", "committed") and labels.NAME.
#ifndef LAMINA_SNAPSHOTTER_FILTER_H_
#define LAMINA_SNAPSHOTTER_FILTER_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "chunkstore/base/status.h"
#include "snapshotter/snapshot_store.h"

namespace re2 {
class RE2;
}

namespace lamina::snapshotter {

class Filter {
 public:
  // Matches what one of `texts` matches; everything if there are none. kInvalidArgument, with the
  // place, if one is not understood.
  static absl::StatusOr<Filter> Parse(const std::vector<std::string>& texts);

  bool Matches(const Snapshot& snapshot) const;

  // For this file's parser.
  enum class Operator { kPresent, kEqual, kNotEqual, kMatches };
  struct Selector {
    std::vector<std::string> path;
    Operator op = Operator::kPresent;
    std::string value;
    std::shared_ptr<const re2::RE2> expression;  // with kMatches
  };

 private:
  std::vector<std::vector<Selector>> any_;  // of which all must match
  bool matches_all_ = false;
};

}  // namespace lamina::snapshotter

#endif  // LAMINA_SNAPSHOTTER_FILTER_H_
