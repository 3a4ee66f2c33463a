// SPDX-License-Identifier: Apache-2.0
#include "erofs/tree.h"

#include <absl/container/btree_map.h>

#include <cstring>
#include <deque>
#include <limits>
#include <utility>

namespace lamina::erofs {
namespace {

// std::string_view compares as unsigned bytes, which is the order EROFS wants.
using EntryMap = absl::btree_map<std::string_view, InodeIndex>;

// Keeps names until the tree goes: a removed name is not reused, which costs little and keeps views
// valid. Names are packed, so that a million of them is a few hundred allocations.
class NameArena {
 public:
  std::string_view Store(std::string_view name) {
    if (name.size() > kPageSize - used_ || pages_.empty()) {
      pages_.push_back(std::make_unique<char[]>(kPageSize));
      used_ = 0;
    }
    char* place = pages_.back().get() + used_;
    std::memcpy(place, name.data(), name.size());
    used_ += name.size();
    return {place, name.size()};
  }

 private:
  static constexpr size_t kPageSize = 16384;
  std::vector<std::unique_ptr<char[]>> pages_;
  size_t used_ = 0;
};

struct Node {
  Inode inode;
  uint32_t links = 0;
  InodeIndex parent = Tree::kRoot;    // directories
  std::unique_ptr<EntryMap> entries;  // directories
};

absl::Status CheckName(std::string_view name) {
  if (name.empty() || name == "." || name == "..") {
    return absl::InvalidArgumentError(fmt::format("\"{}\" cannot be a file name", name));
  }
  if (name.size() > kMaxNameLength) {
    return absl::InvalidArgumentError(fmt::format("file name of {} bytes (at most {}): \"{}\"",
                                                  name.size(), kMaxNameLength, name));
  }
  if (name.find('/') != name.npos || name.find('\0') != name.npos) {
    return absl::InvalidArgumentError(fmt::format("file name with a slash or NUL: \"{}\"", name));
  }
  return absl::OkStatus();
}

}  // namespace

struct Tree::State {
  std::deque<Node> nodes;  // references to elements survive push_back
  NameArena names;
  size_t name_count = 0;
  size_t removed_name_count = 0;

  EntryMap* EntriesOf(InodeIndex directory) { return nodes[directory].entries.get(); }

  // Adds a name for an inode; fails as Tree::Create does.
  absl::Status AddName(InodeIndex directory, std::string_view name, InodeIndex target);
};

absl::Status Tree::State::AddName(InodeIndex directory, std::string_view name, InodeIndex target) {
  RETURN_IF_ERROR(CheckName(name));
  EntryMap* entries = EntriesOf(directory);
  if (entries == nullptr) {
    return absl::InvalidArgumentError(
        fmt::format("cannot add \"{}\" below something that is not a directory", name));
  }
  // Names mostly come in order, so the end is tried first.
  auto place = entries->end();
  if (!entries->empty() && entries->rbegin()->first >= name) {
    place = entries->lower_bound(name);
    if (place->first == name) {
      return absl::AlreadyExistsError(fmt::format("\"{}\" is there already", name));
    }
  }
  entries->emplace_hint(place, names.Store(name), target);
  ++nodes[target].links;
  ++name_count;
  return absl::OkStatus();
}

Tree::Tree() : state_(std::make_unique<State>()) {
  Node& root = state_->nodes.emplace_back();
  root.inode.mode = S_IFDIR | 0755;
  root.links = 1;
  root.entries = std::make_unique<EntryMap>();
}

Tree::Tree(Tree&&) noexcept = default;
Tree& Tree::operator=(Tree&&) noexcept = default;
Tree::~Tree() = default;

const Inode& Tree::inode(InodeIndex index) const { return state_->nodes[index].inode; }
Inode& Tree::inode(InodeIndex index) { return state_->nodes[index].inode; }
uint32_t Tree::link_count(InodeIndex index) const { return state_->nodes[index].links; }
InodeIndex Tree::inode_limit() const { return static_cast<InodeIndex>(state_->nodes.size()); }
InodeIndex Tree::Parent(InodeIndex directory) const { return state_->nodes[directory].parent; }

std::optional<InodeIndex> Tree::Find(InodeIndex directory, std::string_view name) const {
  const EntryMap* entries = state_->EntriesOf(directory);
  if (entries == nullptr) return std::nullopt;
  auto found = entries->find(name);
  if (found == entries->end()) return std::nullopt;
  return found->second;
}

std::vector<DirectoryEntry> Tree::Entries(InodeIndex directory) const {
  std::vector<DirectoryEntry> result;
  const EntryMap* entries = state_->EntriesOf(directory);
  if (entries == nullptr) return result;
  result.reserve(entries->size());
  for (const auto& [name, inode] : *entries) result.push_back({name, inode});
  return result;
}

size_t Tree::entry_count(InodeIndex directory) const {
  const EntryMap* entries = state_->EntriesOf(directory);
  return entries == nullptr ? 0 : entries->size();
}

std::string Tree::PathOf(InodeIndex directory, std::string_view name) const {
  constexpr size_t kLongest = 8192;
  std::string path = fmt::format("/{}", name);
  while (directory != kRoot) {
    if (path.size() > kLongest) return "..." + path;
    const InodeIndex parent = Parent(directory);
    std::string_view directory_name = "?";  // of a directory that was removed
    for (const auto& [entry_name, inode] : *state_->EntriesOf(parent)) {
      if (inode == directory) directory_name = entry_name;
    }
    path = fmt::format("/{}{}", directory_name, path);
    directory = parent;
  }
  return path;
}

absl::StatusOr<InodeIndex> Tree::Create(InodeIndex directory, std::string_view name, Inode inode) {
  if (state_->nodes.size() >= std::numeric_limits<InodeIndex>::max()) {
    return absl::ResourceExhaustedError(fmt::format("no inode number left for \"{}\"", name));
  }
  const auto index = static_cast<InodeIndex>(state_->nodes.size());
  Node& node = state_->nodes.emplace_back();
  node.inode = std::move(inode);
  if (absl::Status added = state_->AddName(directory, name, index); !added.ok()) {
    state_->nodes.pop_back();
    return added;
  }
  if (node.inode.is_directory()) {
    node.parent = directory;
    node.entries = std::make_unique<EntryMap>();
  }
  return index;
}

absl::Status Tree::Link(InodeIndex directory, std::string_view name, InodeIndex target) {
  if (state_->nodes[target].inode.is_directory()) {
    return absl::InvalidArgumentError(fmt::format("hard link \"{}\" to a directory", name));
  }
  return state_->AddName(directory, name, target);
}

void Tree::Remove(InodeIndex directory, std::string_view name) {
  EntryMap* entries = state_->EntriesOf(directory);
  if (entries == nullptr) return;
  auto found = entries->find(name);
  if (found == entries->end()) return;
  // A list instead of recursion: the depth of a tree comes from outside.
  std::vector<InodeIndex> unlinked = {found->second};
  entries->erase(found);
  while (!unlinked.empty()) {
    const InodeIndex index = unlinked.back();
    unlinked.pop_back();
    --state_->nodes[index].links;
    --state_->name_count;
    ++state_->removed_name_count;
    EntryMap* below = state_->EntriesOf(index);
    if (below == nullptr) continue;
    for (const auto& [child_name, child] : *below) unlinked.push_back(child);
    below->clear();
  }
}

size_t Tree::name_count() const { return state_->name_count; }
size_t Tree::removed_name_count() const { return state_->removed_name_count; }

void Tree::Compact() {
  std::deque<Node>& old = state_->nodes;
  std::vector<InodeIndex> indices(old.size());
  InodeIndex next = 0;
  for (size_t i = 0; i < old.size(); ++i) indices[i] = old[i].links > 0 ? next++ : 0;

  const auto compact = std::make_unique<State>();
  compact->name_count = state_->name_count;
  // One at a time, so that there are never two of all.
  for (; !old.empty(); old.pop_front()) {
    if (old.front().links == 0) continue;
    Node& node = compact->nodes.emplace_back(std::move(old.front()));
    node.parent = indices[node.parent];
    if (node.entries == nullptr) continue;
    auto entries = std::make_unique<EntryMap>();
    for (const auto& [name, inode] : *node.entries) {
      entries->emplace_hint(entries->end(), compact->names.Store(name), indices[inode]);
    }
    node.entries = std::move(entries);
  }
  *state_ = std::move(*compact);
}

}  // namespace lamina::erofs
