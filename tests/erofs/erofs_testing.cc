// SPDX-License-Identifier: Apache-2.0
#include "tests/erofs/erofs_testing.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>

#include "erofs/format.h"

namespace lamina::erofs {
namespace {

std::string Escape(std::string_view text) {
  std::string result;
  for (const unsigned char c : text) {
    if (c > ' ' && c < 0x7F && c != '\\') {
      result += static_cast<char>(c);
    } else {
      result += fmt::format("\\{:02x}", c);
    }
  }
  return result;
}

// One line of a description. `identity` is the first path of the inode, which shows hard links.
std::string Line(std::string_view path, const Inode& inode, uint64_t links,
                 std::string_view identity) {
  std::string line =
      fmt::format("{} {:o} {}:{} {}.{:09} size={} rdev={}:{} links={} same={}", Escape(path),
                  inode.mode, inode.uid, inode.gid, inode.mtime.seconds, inode.mtime.nanoseconds,
                  inode.is_regular() ? inode.size : 0, major(inode.rdev), minor(inode.rdev), links,
                  Escape(identity));
  if (inode.is_symlink()) line += " -> " + Escape(inode.target);
  for (const Xattr& xattr : inode.xattrs) {
    line += fmt::format(" {}={}", Escape(xattr.name), Escape(xattr.value));
  }
  return line + "\n";
}

std::string Join(std::string_view directory, std::string_view name) {
  return fmt::format("{}/{}", directory == "/" ? "" : directory, name);
}

// Sorted lines of a walk.
class Lines {
 public:
  void Add(std::string_view path, std::string line) { lines_.emplace(path, std::move(line)); }
  std::string Text() const {
    std::string text;
    for (const auto& [path, line] : lines_) text += line;
    return text;
  }

 private:
  std::map<std::string, std::string, std::less<>> lines_;
};

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::runtime_error(std::string(value.status().message()));
  return *std::move(value);
}

[[noreturn]] void Throw(std::string_view what) {
  throw std::runtime_error(fmt::format("{}: {}", what, std::strerror(errno)));
}

// Visits names in byte order, directories after all else at the same level.
void WalkTree(const Tree& tree,
              const std::function<void(const std::string& path, InodeIndex index)>& visit) {
  std::vector<std::pair<std::string, InodeIndex>> pending = {{"/", Tree::kRoot}};
  visit("/", Tree::kRoot);
  for (size_t i = 0; i < pending.size(); ++i) {
    const auto [path, directory] = pending[i];
    for (const DirectoryEntry& entry : tree.Entries(directory)) {
      const std::string child = Join(path, entry.name);
      visit(child, entry.inode);
      if (tree.inode(entry.inode).is_directory()) pending.emplace_back(child, entry.inode);
    }
  }
}

std::vector<Xattr> ListXattrs(const std::string& path) {
  std::string names(65536, '\0');
  const ssize_t size = llistxattr(path.c_str(), names.data(), names.size());
  if (size < 0) Throw("listxattr " + path);
  names.resize(size);
  std::vector<Xattr> xattrs;
  for (size_t at = 0; at < names.size(); at = names.find('\0', at) + 1) {
    Xattr xattr = {.name = names.c_str() + at, .value = std::string(65536, '\0')};
    const ssize_t length =
        lgetxattr(path.c_str(), xattr.name.c_str(), xattr.value.data(), xattr.value.size());
    if (length < 0) Throw("getxattr " + path + " " + xattr.name);
    xattr.value.resize(length);
    xattrs.push_back(std::move(xattr));
  }
  std::sort(xattrs.begin(), xattrs.end());
  return xattrs;
}

Inode StatInode(const std::string& path, struct stat& status) {
  if (lstat(path.c_str(), &status) != 0) Throw("lstat " + path);
  Inode inode = {.mode = static_cast<uint16_t>(status.st_mode),
                 .uid = status.st_uid,
                 .gid = status.st_gid,
                 .mtime = {status.st_mtim.tv_sec, static_cast<uint32_t>(status.st_mtim.tv_nsec)},
                 .size = static_cast<uint64_t>(status.st_size),
                 .rdev = status.st_rdev};
  if (inode.is_symlink()) {
    inode.target.resize(8192);
    const ssize_t length = readlink(path.c_str(), inode.target.data(), inode.target.size());
    if (length < 0) Throw("readlink " + path);
    inode.target.resize(length);
  }
  inode.xattrs = ListXattrs(path);
  return inode;
}

std::vector<std::string> ListNames(const std::string& path) {
  std::vector<std::string> names;
  DIR* directory = opendir(path.c_str());
  if (directory == nullptr) Throw("opendir " + path);
  errno = 0;
  while (const dirent* entry = readdir(directory)) names.push_back(entry->d_name);
  if (errno != 0) Throw("readdir " + path);
  closedir(directory);
  std::erase_if(names, [](const std::string& name) { return name == "." || name == ".."; });
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

std::string Describe(const Tree& tree) {
  Lines lines;
  std::map<InodeIndex, std::string> first_path;
  WalkTree(tree, [&](const std::string& path, InodeIndex index) {
    const Inode& inode = tree.inode(index);
    uint64_t links = tree.link_count(index);
    if (inode.is_directory()) {
      ++links;
      for (const DirectoryEntry& entry : tree.Entries(index)) {
        links += tree.inode(entry.inode).is_directory();
      }
    }
    const std::string& same = first_path.try_emplace(index, path).first->second;
    lines.Add(path, Line(path, inode, links, same));
  });
  return lines.Text();
}

std::string DescribeExtents(const Tree& tree) {
  Lines lines;
  WalkTree(tree, [&](const std::string& path, InodeIndex index) {
    std::string line = Escape(path);
    const Inode& inode = tree.inode(index);
    Extent joined;
    const auto flush = [&] {
      if (joined.length == 0) return;
      line += fmt::format(" [{}+{} at {}:{}]", joined.offset, joined.length, joined.device,
                          joined.block);
    };
    for (const Extent& extent : inode.extents) {
      if (joined.length > 0 && joined.device == extent.device &&
          joined.offset + joined.length == extent.offset &&
          joined.block + joined.length / kBlockSize == extent.block) {
        joined.length += extent.length;
      } else {
        flush();
        joined = extent;
      }
    }
    flush();
    if (inode.is_regular()) lines.Add(path, line + "\n");
  });
  return lines.Text();
}

std::string DescribeDirectory(const std::string& top) {
  Lines lines;
  std::map<ino_t, std::string> first_path;
  std::vector<std::string> pending = {"/"};
  const auto visit = [&](const std::string& path) {
    struct stat status;
    const Inode inode = StatInode(top + path, status);
    const std::string& same = first_path.try_emplace(status.st_ino, path).first->second;
    lines.Add(path, Line(path, inode, status.st_nlink, same));
    return inode.is_directory();
  };
  visit("/");
  for (size_t i = 0; i < pending.size(); ++i) {
    const std::string directory = pending[i];
    for (const std::string& name : ListNames(top + directory)) {
      const std::string path = Join(directory, name);
      // In a directory that only one layer has, overlayfs lists whiteouts that it does not open.
      if (faccessat(AT_FDCWD, (top + path).c_str(), F_OK, AT_SYMLINK_NOFOLLOW) != 0) continue;
      if (visit(path)) pending.push_back(path);
    }
  }
  return lines.Text();
}

std::string DescribeImage(const Reader& reader) {
  Lines lines;
  std::map<Nid, std::string> first_path;
  std::vector<std::pair<std::string, Nid>> pending;
  const auto visit = [&](const std::string& path, Nid nid) {
    const InodeInfo info = Must(reader.ReadInode(nid));
    Inode inode = {.mode = info.mode,
                   .uid = info.uid,
                   .gid = info.gid,
                   .mtime = info.mtime,
                   .size = info.size,
                   .rdev = info.rdev,
                   .xattrs = Must(reader.ReadXattrs(info))};
    if (info.is_symlink()) inode.target = Must(reader.ReadLink(info));
    const std::string& same = first_path.try_emplace(nid, path).first->second;
    lines.Add(path, Line(path, inode, info.links, same));
    if (info.is_directory()) pending.emplace_back(path, nid);
  };
  visit("/", reader.root());
  for (size_t i = 0; i < pending.size(); ++i) {
    const auto [path, nid] = pending[i];
    std::vector<std::pair<std::string, Nid>> children;
    const absl::Status status =
        reader.ReadDirectory(Must(reader.ReadInode(nid)), 0, [&](const Reader::Entry& entry) {
          if (entry.name != "." && entry.name != "..") {
            children.emplace_back(Join(path, entry.name), entry.nid);
          }
          return true;
        });
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
    for (const auto& [child, child_nid] : children) visit(child, child_nid);
  }
  return lines.Text();
}

namespace {

// Makes the inodes of RandomTree.
class InodeMaker {
 public:
  InodeMaker(std::mt19937_64& random, std::span<const Device> devices)
      : random_(random), devices_(devices) {}

  uint64_t Below(uint64_t limit) { return random_() % limit; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }

  Inode Make(mode_t type) {
    Inode inode;
    inode.mode = static_cast<uint16_t>(type | Below(010000));
    inode.uid = Owner();
    inode.gid = Owner();
    inode.mtime = Time();
    if (S_ISREG(type)) AddContent(inode);
    if (S_ISLNK(type)) {
      inode.mode = S_IFLNK | 0777;
      inode.target = Text(1 + Below(OneIn(10) ? 4095 : 60));
    }
    if (S_ISCHR(type) || S_ISBLK(type)) inode.rdev = makedev(Below(4096), 1 + Below(1 << 20));
    if (OneIn(3)) AddXattrs(inode);
    return inode;
  }

  std::string Name() {
    std::string name = Text(1 + Below(OneIn(20) ? 255 : 16));
    if (name == "." || name == "..") name = "dots";
    return name;
  }

 private:
  uint32_t Owner() { return static_cast<uint32_t>(OneIn(8) ? random_() : Below(3) * 1000); }

  Timestamp Time() {
    if (OneIn(2)) return {1'700'000'000, 123'456'789};
    if (OneIn(8)) return {-static_cast<int64_t>(Below(1ull << 33)), 999'999'999};
    return {static_cast<int64_t>(Below(1ull << 34)), static_cast<uint32_t>(Below(1'000'000'000))};
  }

  // Any bytes but NUL and slash.
  std::string Text(size_t length) {
    std::string text;
    while (text.size() < length) {
      const char c = static_cast<char>(OneIn(6) ? Below(256) : 'a' + Below(26));
      if (c != '\0' && c != '/') text += c;
    }
    return text;
  }

  void AddXattrs(Inode& inode) {
    inode.xattrs.push_back({"security.label", fmt::format("label {}", Below(4))});
    if (OneIn(3)) inode.xattrs.push_back({"trusted." + Text(1 + Below(240)), Text(Below(64))});
    if (OneIn(3)) inode.xattrs.push_back({"user.note", Text(Below(OneIn(9) ? 9000 : 64))});
    // user.* is for files and directories only (xattr(7)).
    if (!inode.is_regular() && !inode.is_directory()) {
      std::erase_if(inode.xattrs, [](const Xattr& x) { return x.name.starts_with("user."); });
    }
    std::sort(inode.xattrs.begin(), inode.xattrs.end());
  }

  void AddContent(Inode& inode) {
    if (OneIn(8)) return;
    inode.size = 1 + Below(OneIn(10) ? 600'000 : 20'000);
    uint64_t offset = 0;
    const uint64_t unit = kBlockSize << Below(5);
    while (offset < inode.size) {
      const uint64_t length = std::min(unit * (1 + Below(8)), inode.size - offset);
      if (!OneIn(4)) {
        const auto device = static_cast<uint16_t>(1 + Below(devices_.size()));
        const uint64_t blocks = (length + kBlockSize - 1) / kBlockSize;
        inode.extents.push_back(
            {.offset = offset,
             .length = length,
             .device = device,
             .block = static_cast<uint32_t>(Below(devices_[device - 1].blocks - blocks))});
      }
      offset += length;
    }
  }

  std::mt19937_64& random_;
  std::span<const Device> devices_;
};

}  // namespace

Tree RandomTree(uint64_t seed, size_t inodes, std::span<const Device> devices) {
  std::mt19937_64 random(seed);
  InodeMaker maker(random, devices);
  constexpr mode_t kTypes[] = {S_IFREG, S_IFREG, S_IFREG, S_IFREG, S_IFDIR, S_IFLNK,
                               S_IFREG, S_IFREG, S_IFCHR, S_IFBLK, S_IFIFO, S_IFSOCK};
  Tree tree;
  tree.inode(Tree::kRoot) = maker.Make(S_IFDIR);
  std::vector<InodeIndex> directories = {Tree::kRoot};
  std::vector<InodeIndex> others;
  while (tree.inode_limit() < inodes) {
    const InodeIndex directory = directories[maker.Below(directories.size())];
    const std::string name = maker.Name();
    if (!others.empty() && maker.OneIn(15)) {
      tree.Link(directory, name, others[maker.Below(others.size())]).IgnoreError();
      continue;
    }
    Inode inode = maker.Make(kTypes[maker.Below(std::size(kTypes))]);
    const bool is_directory = inode.is_directory();
    const absl::StatusOr<InodeIndex> created = tree.Create(directory, name, std::move(inode));
    if (created.ok()) (is_directory ? directories : others).push_back(*created);
  }
  return tree;
}

std::string BlockContent(uint16_t device, uint64_t block) {
  std::string content;
  while (content.size() < kBlockSize) {
    content += fmt::format("device {} block {} byte {}\n", device, block, content.size());
  }
  content.resize(kBlockSize);
  return content;
}

absl::Status WriteDeviceFile(const std::string& path, uint16_t device, uint32_t blocks) {
  std::string content;
  for (uint64_t block = 0; block < blocks; ++block) content += BlockContent(device, block);
  return WriteFile(path, content);
}

absl::Status WriteFile(const std::string& path, std::string_view content) {
  ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(path, O_CREAT | O_TRUNC | O_WRONLY));
  return WriteFull(file.get(), 0, AsBytes(content));
}

bool CanMount() { return geteuid() == 0; }

absl::StatusOr<KernelMount> KernelMount::Create(const std::string& image,
                                                std::span<const std::string> devices,
                                                const std::string& mount_point) {
  const UniqueFd context(fsopen("erofs", FSOPEN_CLOEXEC));
  if (!context.valid()) return ErrnoStatus(errno, "fsopen erofs");
  const auto set = [&](const char* key, const std::string& value) {
    if (fsconfig(context.get(), FSCONFIG_SET_STRING, key, value.c_str(), 0) == 0) {
      return absl::OkStatus();
    }
    return ErrnoStatus(errno, fmt::format("fsconfig {}={}", key, value));
  };
  RETURN_IF_ERROR(set("source", image));
  for (const std::string& device : devices) RETURN_IF_ERROR(set("device", device));
  if (fsconfig(context.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0) {
    return ErrnoStatus(errno, "create EROFS from " + image);
  }
  const UniqueFd mount(fsmount(context.get(), FSMOUNT_CLOEXEC, 0));
  if (!mount.valid()) return ErrnoStatus(errno, "fsmount " + image);
  if (move_mount(mount.get(), "", AT_FDCWD, mount_point.c_str(), MOVE_MOUNT_F_EMPTY_PATH) != 0) {
    return ErrnoStatus(errno, "move_mount to " + mount_point);
  }
  return KernelMount(mount_point);
}

absl::StatusOr<KernelMount> KernelMount::Overlay(const std::string& layers,
                                                 const std::string& mount_point) {
  const std::string options = "lowerdir=" + layers;
  if (mount("overlay", mount_point.c_str(), "overlay", MS_RDONLY, options.c_str()) != 0) {
    return ErrnoStatus(errno, "mount overlay of " + layers);
  }
  return KernelMount(mount_point);
}

KernelMount::~KernelMount() {
  if (!path_.empty()) umount2(path_.c_str(), MNT_DETACH);
}

CommandResult RunCommand(const std::string& command) {
  CommandResult result;
  FILE* pipe = popen((command + " 2>&1").c_str(), "re");
  if (pipe == nullptr) return result;
  char buffer[4096];
  while (const size_t length = fread(buffer, 1, sizeof(buffer), pipe)) {
    result.output.append(buffer, length);
  }
  result.ok = pclose(pipe) == 0;
  return result;
}

TemporaryDirectory MakeScratch() {
  return Must(TemporaryDirectory::Create("/tmp", "lamina-erofs-"));
}

}  // namespace lamina::erofs
