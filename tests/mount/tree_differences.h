// SPDX-License-Identifier: Apache-2.0
//
// CompareTrees for tests that use ::testing, which the name space of compare_trees.h would hide.
#ifndef LAMINA_TESTS_MOUNT_TREE_DIFFERENCES_H_
#define LAMINA_TESTS_MOUNT_TREE_DIFFERENCES_H_

#include <string>
#include <vector>

namespace lamina::fs {

// What differs between two directory trees, one line each; an error is a line too.
std::vector<std::string> TreeDifferences(const std::string& left, const std::string& right);

}  // namespace lamina::fs

#endif  // LAMINA_TESTS_MOUNT_TREE_DIFFERENCES_H_
