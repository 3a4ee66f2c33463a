// SPDX-License-Identifier: Apache-2.0
#include "tests/mount/tree_differences.h"

#include "tests/compare/compare_trees.h"

namespace lamina::fs {

std::vector<std::string> TreeDifferences(const std::string& left, const std::string& right) {
  const auto comparison = lamina::compare::CompareTrees(left, right, {});
  if (!comparison.ok()) return {std::string(comparison.status().message())};
  return comparison->differences;
}

}  // namespace lamina::fs
