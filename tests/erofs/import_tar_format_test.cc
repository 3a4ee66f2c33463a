// SPDX-License-Identifier: Apache-2.0
//
// The tar format itself: numbers, extended headers, long names, sparse files, ends of archives, and
// archives that must be refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "erofs/import.h"
#include "erofs/tar_header.h"
#include "erofs/tar_pax.h"
#include "tests/erofs/import_testing.h"

namespace lamina::erofs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A number in GNU's base-256 form.
std::string Base256(size_t width, int64_t value) {
  std::string field(width, value < 0 ? '\xff' : '\0');
  for (size_t i = 0; i < std::min<size_t>(width, 8); ++i) {
    field[width - 1 - i] = static_cast<char>(value >> (8 * i));
  }
  field[0] = static_cast<char>(field[0] | 0x80);
  return field;
}

class ImportTarFormatTest : public TarImportFixture {
 protected:
  Inode ImportOne(TarFields fields) {
    fields.name = "x";
    return At(Import(TarWriter().Add(fields).Finish()), "x");
  }
  Inode ImportPax(const std::vector<std::pair<std::string, std::string>>& records) {
    return At(Import(TarWriter().Pax(records).File("x").Finish()), "x");
  }
};

// Numbers.

TEST_F(ImportTarFormatTest, OctalNumbersMayHaveBlanksAroundThem) {
  EXPECT_EQ(ParseTarNumber("  17 \0\0").value(), 017);
  EXPECT_EQ(ParseTarNumber(std::string_view("0000017\0", 8)).value(), 017);
  EXPECT_EQ(ParseTarNumber("77777777").value(), 077777777);
  EXPECT_EQ(ParseTarNumber(std::string_view("\0\0\0\0", 4)).value(), 0);
  EXPECT_EQ(ParseTarNumber("        ").value(), 0);
  EXPECT_FALSE(ParseTarNumber("0000018").ok());
  EXPECT_FALSE(ParseTarNumber("-1").ok());
}

TEST_F(ImportTarFormatTest, Base256NumbersAreSignedAndOf64Bits) {
  for (int64_t value :
       {int64_t{0}, int64_t{1}, int64_t{-1}, int64_t{255}, int64_t{-256}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(ParseTarNumber(Base256(12, value)).value(), value);
  }
  EXPECT_EQ(ParseTarNumber(Base256(8, 4294967294)).value(), 4294967294);
  std::string large = Base256(12, 0);
  large[3] = 1;
  EXPECT_FALSE(ParseTarNumber(large).ok());
  std::string small = Base256(12, -1);
  small[3] = 0;
  EXPECT_FALSE(ParseTarNumber(small).ok());
}

TEST_F(ImportTarFormatTest, NegativeAndLateTimesAreRead) {
  EXPECT_EQ(ImportOne({.raw_mtime = Base256(12, -1)}).mtime, (Timestamp{-1, 0}));
  EXPECT_EQ(ImportOne({.raw_mtime = Base256(12, -62135596800)}).mtime.seconds, -62135596800);
  EXPECT_EQ(ImportOne({.raw_mtime = Base256(12, 1LL << 40)}).mtime.seconds, 1LL << 40);
  EXPECT_EQ(ImportOne({.mtime = 077777777777}).mtime.seconds, 077777777777);
}

TEST_F(ImportTarFormatTest, OwnersBeyond16And21BitsAreRead) {
  EXPECT_EQ(ImportOne({.uid = 65536}).uid, 65536U);
  EXPECT_EQ(ImportOne({.raw_uid = Base256(8, 2097152)}).uid, 2097152U);
  EXPECT_EQ(ImportOne({.raw_uid = Base256(8, 4294967294)}).uid, 4294967294U);
  const Inode inode = ImportPax({{"uid", "3000000000"}, {"gid", "4294967294"}});
  EXPECT_EQ(inode.uid, 3000000000U);
  EXPECT_EQ(inode.gid, 4294967294U);
}

TEST_F(ImportTarFormatTest, OwnersThatNoFileCanHaveAreRefused) {
  EXPECT_THAT(Error(TarWriter().Pax({{"uid", "4294967295"}}).File("x").Finish()),
              HasSubstr("owner 4294967295:0 is out of range"));
  EXPECT_THAT(Error(TarWriter().Add({.name = "x", .raw_uid = Base256(8, -2)}).Finish()),
              HasSubstr("uid: -2 is negative"));
  EXPECT_THAT(Error(TarWriter().Pax({{"gid", "-1"}}).File("x").Finish()),
              HasSubstr("not a decimal number"));
}

TEST_F(ImportTarFormatTest, FilesOfMoreThan8GibAreRead) {
  constexpr uint64_t kSize = (uint64_t{9} << 30) + 1;
  TarWriter base256;
  base256.Add({.name = "x", .raw_size = Base256(12, kSize)});
  TarWriter pax;
  pax.Pax({{"size", std::to_string(kSize)}}).File("x");
  for (const std::string& head : {base256.bytes(), pax.bytes()}) {
    // The stream: the head, zeros that nobody writes, and an entry after them.
    const uint64_t content_end = head.size() + (kSize + 511) / 512 * 512;
    const std::string tail = TarWriter().File("after").Finish();
    uint64_t position = 0;
    auto read = [&](std::span<std::byte> into) -> absl::StatusOr<size_t> {
      size_t length = into.size();
      if (position < head.size()) {
        length = head.copy(reinterpret_cast<char*>(into.data()), length, position);
      } else if (position < content_end) {
        length = std::min<uint64_t>(length, content_end - position);
      } else {
        length = tail.copy(reinterpret_cast<char*>(into.data()), length, position - content_end);
      }
      position += length;
      return length;
    };
    CountingSink sink;
    const absl::StatusOr<Tree> tree = ImportTar(read, sink);
    ASSERT_TRUE(tree.ok()) << tree.status();
    EXPECT_EQ(At(*tree, "x").size, kSize);
    EXPECT_EQ(sink.bytes, kSize);
    EXPECT_TRUE(Exists(*tree, "after"));
  }
}

TEST_F(ImportTarFormatTest, FileOfMoreThan16TibIsRefused) {
  EXPECT_THAT(
      Error(TarWriter().Add({.name = "x", .raw_size = Base256(12, (1LL << 44) + 1)}).Finish()),
      AllOf(HasSubstr("\"x\""), HasSubstr("17592186044417 bytes")));
}

TEST_F(ImportTarFormatTest, NegativeSizeIsRefused) {
  EXPECT_THAT(Error(TarWriter().Add({.name = "x", .raw_size = Base256(12, -1)}).Finish()),
              HasSubstr("size: -1 is negative"));
}

// Names.

TEST_F(ImportTarFormatTest, UstarPrefixGoesBeforeTheName) {
  EXPECT_TRUE(Exists(
      Import(TarWriter().Add({.name = std::string(100, 'n'), .prefix = "some/dir"}).Finish()),
      "some/dir/" + std::string(100, 'n')));
}

TEST_F(ImportTarFormatTest, GnuHeadersHaveNoPrefix) {
  EXPECT_TRUE(
      Exists(Import(TarWriter().Add({.name = "x", .gnu = true, .prefix = "12345"}).Finish()), "x"));
}

TEST_F(ImportTarFormatTest, V7HeadersWithoutMagicAreRead) {
  std::string block = TarHeaderBlock({.name = "x", .prefix = "ignored"}, 2);
  block.replace(257, 8, 8, '\0');
  SetTarChecksum(block);
  const Tree tree = Import(TarWriter().Raw(block).Raw("ab").Finish());
  EXPECT_EQ(sink_.Read(At(tree, "x")), "ab");
}

TEST_F(ImportTarFormatTest, GnuLongNamesAndLinksAreRead) {
  const std::string name = std::string(150, 'd') + "/" + std::string(200, 'f');
  const std::string target(300, 't');
  TarWriter tar;
  tar.Add({.name = "././@LongLink", .type = 'K', .content = target + '\0', .gnu = true});
  tar.Add({.name = "././@LongLink", .type = 'L', .content = name + '\0', .gnu = true});
  tar.Add({.name = name.substr(0, 100), .type = '2', .link = target.substr(0, 100), .gnu = true});
  tar.File("short");
  const Tree tree = Import(tar.Finish());
  EXPECT_EQ(At(tree, name).target, target);
  EXPECT_TRUE(Exists(tree, "short"));
}

TEST_F(ImportTarFormatTest, GnuLongLinkAppliesToHardLinks) {
  const std::string name(200, 'f');
  TarWriter tar;
  tar.Add({.name = "L", .type = 'L', .content = name + '\0'}).File("cut");
  tar.Add({.name = "K", .type = 'K', .content = name + '\0'}).HardLink("link", "cut");
  const Tree tree = Import(tar.Finish());
  EXPECT_EQ(tree.link_count(*tree.Find(Tree::kRoot, name)), 2U);
}

TEST_F(ImportTarFormatTest, PaxPathCountsMoreThanGnuLongName) {
  TarWriter tar;
  tar.Add({.name = "L", .type = 'L', .content = "gnu"}).Pax({{"path", "pax"}}).File("cut");
  EXPECT_TRUE(Exists(Import(tar.Finish()), "pax"));
}

// Extended headers.

TEST_F(ImportTarFormatTest, PaxRecordsReplaceHeaderFields) {
  TarWriter tar;
  tar.Pax({{"path", "real/name"}, {"uid", "7"}, {"gid", "8"}, {"size", "3"}, {"mtime", "12.5"}});
  tar.Raw(TarHeaderBlock({.name = "x", .uid = 1, .gid = 2, .mtime = 3}, 0)).Raw("abc");
  const Tree tree = Import(tar.Finish());
  const Inode& inode = At(tree, "real/name");
  EXPECT_EQ(inode.uid, 7U);
  EXPECT_EQ(inode.gid, 8U);
  EXPECT_EQ(inode.mtime, (Timestamp{12, 500000000}));
  EXPECT_EQ(sink_.Read(inode), "abc");
}

TEST_F(ImportTarFormatTest, PaxRecordsApplyToOneEntryOnly) {
  const Tree tree = Import(TarWriter().Pax({{"uid", "7"}}).File("a").File("b").Finish());
  EXPECT_EQ(At(tree, "a").uid, 7U);
  EXPECT_EQ(At(tree, "b").uid, 0U);
}

TEST_F(ImportTarFormatTest, PaxTimesAreRoundedDownToNanoseconds) {
  const std::pair<const char*, Timestamp> cases[] = {
      {"0", {0, 0}},
      {"1.5", {1, 500000000}},
      {"1.", {1, 0}},
      {"1.000000001", {1, 1}},
      {"1.0000000019", {1, 1}},
      {"-1", {-1, 0}},
      {"-1.5", {-2, 500000000}},
      {"-0.25", {-1, 750000000}},
      {"-1.0000000001", {-2, 999999999}},
      {"9223372036854775807.999999999", {INT64_MAX, 999999999}},
      {"-9223372036854775808", {INT64_MIN, 0}}};
  for (const auto& [text, time] : cases) {
    const absl::StatusOr<Timestamp> parsed = ParsePaxTime(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(*parsed, time) << text;
  }
  for (const char* text :
       {"", "x", "1.5x", "1,5", "+1", "1e9", "9223372036854775808", "-9223372036854775808.5"}) {
    EXPECT_FALSE(ParsePaxTime(text).ok()) << text;
  }
}

TEST_F(ImportTarFormatTest, UnknownPaxKeysAreIgnored) {
  EXPECT_TRUE(ImportPax({{"comment", "x"},
                         {"atime", "what"},
                         {"hdrcharset", "BINARY"},
                         {"RHT.security.selinux", "label"}})
                  .is_regular());
}

TEST_F(ImportTarFormatTest, EmptyPaxValueGivesTheHeaderFieldBack) {
  const Tree tree = Import(TarWriter()
                               .Pax({{"uid", "7"}}, 'g')
                               .Pax({{"uid", ""}, {"path", ""}})
                               .Add({.name = "x", .uid = 3})
                               .Finish());
  EXPECT_EQ(At(tree, "x").uid, 3U);
}

TEST_F(ImportTarFormatTest, GlobalHeadersApplyUntilChanged) {
  TarWriter tar;
  tar.Pax({{"mtime", "5"}, {"comment", "a commit"}}, 'g').File("a");
  tar.Pax({{"mtime", "6"}}).File("b").File("c");
  tar.Pax({{"mtime", "7"}}, 'g').File("d");
  const Tree tree = Import(tar.Finish());
  EXPECT_EQ(At(tree, "a").mtime.seconds, 5);
  EXPECT_EQ(At(tree, "b").mtime.seconds, 6);
  EXPECT_EQ(At(tree, "c").mtime.seconds, 5);
  EXPECT_EQ(At(tree, "d").mtime.seconds, 7);
}

TEST_F(ImportTarFormatTest, GlobalHeaderBetweenExtendedHeaderAndEntryIsRead) {
  const Tree tree =
      Import(TarWriter().Pax({{"uid", "7"}}).Pax({{"mtime", "5"}}, 'g').File("a").Finish());
  EXPECT_EQ(At(tree, "a").uid, 7U);
  EXPECT_EQ(At(tree, "a").mtime.seconds, 5);
}

TEST_F(ImportTarFormatTest, GlobalHeaderWithWhatBelongsToOneFileIsRefused) {
  for (const char* key : {"path", "linkpath", "size", "GNU.sparse.major"}) {
    EXPECT_THAT(Error(TarWriter().Pax({{key, "1"}}, 'g').File("a").Finish()),
                HasSubstr("global extended header with a path, link or size"));
  }
}

TEST_F(ImportTarFormatTest, GlobalXattrsApplyWhereAnEntryHasNone) {
  TarWriter tar;
  tar.Pax({{"SCHILY.xattr.user.a", "global"}, {"SCHILY.xattr.user.b", "global"}}, 'g').File("x");
  tar.Pax({{"SCHILY.xattr.user.b", "own"}}).File("y").File("z");
  const Tree tree = Import(tar.Finish());
  const std::vector<Xattr> global = {{"user.a", "global"}, {"user.b", "global"}};
  EXPECT_EQ(At(tree, "x").xattrs, global);
  EXPECT_EQ(At(tree, "y").xattrs, (std::vector<Xattr>{{"user.a", "global"}, {"user.b", "own"}}));
  EXPECT_EQ(At(tree, "z").xattrs, global);
}

TEST_F(ImportTarFormatTest, XattrsBeyondWhatLinuxCanListAreRefused) {
  std::vector<std::pair<std::string, std::string>> records;
  for (int i = 0; i < 20'000; ++i) records.emplace_back(fmt::format("SCHILY.xattr.{:x}", i), "");
  for (const char type : {'x', 'g'}) {
    EXPECT_THAT(Error(TarWriter().Pax(records, type).File("a").Finish()),
                HasSubstr("more than 8192 xattrs"));
  }
}

TEST_F(ImportTarFormatTest, GlobalHeadersTogetherAreBounded) {
  TarWriter tar;
  for (int i = 0; i < 3; ++i) {
    tar.Pax({{fmt::format("SCHILY.xattr.user.{}", i), std::string(600'000, 'x')}}, 'g');
  }
  EXPECT_THAT(Error(tar.File("a").Finish()), HasSubstr("global xattrs of more than"));
}

TEST_F(ImportTarFormatTest, GlobalXattrsOfEntriesThatAreNotKeptCountToo) {
  std::vector<std::pair<std::string, std::string>> records;
  for (int i = 0; i < 8000; ++i) records.emplace_back(fmt::format("SCHILY.xattr.{:x}", i), "");
  TarWriter tar;
  tar.Pax(records, 'g');
  for (int i = 0; i < 4000; ++i) tar.File(".wh..wh.a");
  EXPECT_THAT(Error(tar.Finish()), HasSubstr("bytes of memory"));
}

TEST_F(ImportTarFormatTest, SolarisExtendedHeaderIsRead) {
  EXPECT_EQ(At(Import(TarWriter().Pax({{"uid", "7"}}, 'X').File("a").Finish()), "a").uid, 7U);
}

TEST_F(ImportTarFormatTest, MalformedPaxRecordsAreErrors) {
  for (const char* body : {"x", "5 a=b", "3 a=b\n", "6 a=b\n\n", "99 a=b\n", "7 a=b\n", "-6 a=b\n",
                           "6aa=b\n", "6 abb\n", "6 =ab\n", "99999999999999999999 a=b\n", "3 \n"}) {
    EXPECT_THAT(
        Error(TarWriter().Add({.name = "h", .type = 'x', .content = body}).File("x").Finish()),
        HasSubstr("in an extended header"))
        << body;
  }
}

TEST_F(ImportTarFormatTest, NulInAPathIsAnError) {
  const std::string bad("a\0b", 3);
  EXPECT_THAT(Error(TarWriter().Pax({{"path", bad}}).File("x").Finish()), HasSubstr("NUL"));
  EXPECT_THAT(Error(TarWriter().Pax({{"linkpath", bad}}).Symlink("x", "y").Finish()),
              HasSubstr("NUL"));
}

TEST_F(ImportTarFormatTest, OversizedExtendedHeadersAreRefused) {
  for (char type : {'x', 'g', 'L', 'K'}) {
    EXPECT_THAT(
        Error(TarWriter().Raw(TarHeaderBlock({.name = "h", .type = type}, 1 << 21)).Finish()),
        HasSubstr("2097152 bytes"));
  }
}

TEST_F(ImportTarFormatTest, MemoryOfHostileAttributesIsBounded) {
  TarWriter global;
  std::vector<std::pair<std::string, std::string>> records;
  for (int i = 0; i < 15; ++i) {
    records.emplace_back(fmt::format("SCHILY.xattr.user.{}", i), std::string(65536, 'x'));
  }
  global.Pax(records, 'g');
  // One entry of 512 bytes takes a megabyte, again and again.
  const std::string head = global.bytes();
  uint64_t entry = 0;
  bool started = false;
  auto read = [&](std::span<std::byte> into) -> absl::StatusOr<size_t> {
    std::string block = fmt::format("{}", entry);
    if (started) {
      block = TarHeaderBlock({.name = block}, 0);
      ++entry;
    } else {
      // The head is larger than what is asked for at once, so it goes out in parts.
      static constexpr size_t kPart = 512;
      block = head.substr(entry * kPart, kPart);
      if (++entry * kPart >= head.size()) {
        started = true;
        entry = 0;
      }
    }
    return block.copy(reinterpret_cast<char*>(into.data()), into.size());
  };
  CountingSink sink;
  const absl::StatusOr<Tree> tree = ImportTar(read, sink);
  EXPECT_EQ(tree.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_LT(entry, 2000U);
}

// Sparse files.

std::string Blocks(char byte, size_t blocks) { return std::string(blocks * kBlockSize, byte); }

TEST_F(ImportTarFormatTest, PaxSparse10IsRead) {
  TarWriter tar;
  std::string map = "2\n8192\n4096\n20480\n0\n";
  map.resize(512);
  tar.Pax({{"GNU.sparse.major", "1"},
           {"GNU.sparse.minor", "0"},
           {"GNU.sparse.name", "dir/real"},
           {"GNU.sparse.realsize", "20480"}});
  tar.File("GNUSparseFile.0/real", map + Blocks('A', 1)).File("after");
  const Tree tree = Import(tar.Finish());
  EXPECT_EQ(sink_.Read(At(tree, "dir/real")), Blocks('\0', 2) + Blocks('A', 1) + Blocks('\0', 2));
  EXPECT_EQ(sink_.hole_bytes(), 4 * kBlockSize);
  EXPECT_TRUE(Exists(tree, "after"));
}

TEST_F(ImportTarFormatTest, PaxSparse01IsRead) {
  TarWriter tar;
  tar.Pax({{"GNU.sparse.size", "16384"},
           {"GNU.sparse.numblocks", "2"},
           {"GNU.sparse.name", "real"},
           {"GNU.sparse.map", "4096,4096,12288,4096"}});
  tar.File("x", Blocks('A', 1) + Blocks('B', 1));
  EXPECT_EQ(sink_.Read(At(Import(tar.Finish()), "real")),
            Blocks('\0', 1) + Blocks('A', 1) + Blocks('\0', 1) + Blocks('B', 1));
}

TEST_F(ImportTarFormatTest, PaxSparse00IsRead) {
  TarWriter tar;
  tar.Pax({{"GNU.sparse.size", "16384"},
           {"GNU.sparse.numblocks", "2"},
           {"GNU.sparse.offset", "4096"},
           {"GNU.sparse.numbytes", "4096"},
           {"GNU.sparse.offset", "12288"},
           {"GNU.sparse.numbytes", "4096"}});
  tar.File("x", Blocks('A', 1) + Blocks('B', 1));
  EXPECT_EQ(sink_.Read(At(Import(tar.Finish()), "x")),
            Blocks('\0', 1) + Blocks('A', 1) + Blocks('\0', 1) + Blocks('B', 1));
}

TEST_F(ImportTarFormatTest, SparseFileWithoutDataIsAHole) {
  TarWriter tar;
  tar.Pax({{"GNU.sparse.size", "1099511627776"}, {"GNU.sparse.numblocks", "0"}}).File("x");
  const Tree tree = Import(tar.Finish());
  EXPECT_EQ(At(tree, "x").size, uint64_t{1} << 40);
  EXPECT_TRUE(At(tree, "x").extents.empty());
  EXPECT_EQ(sink_.hole_bytes(), uint64_t{1} << 40);
}

// A header of GNU's old sparse format: pairs of offset and length, and whether extensions follow.
std::string OldSparseHeader(const std::vector<SparseRun>& runs, uint64_t size, bool extended) {
  uint64_t stored = 0;
  for (const SparseRun& run : runs) stored += run.length;
  std::string block = TarHeaderBlock({.name = "x", .type = 'S', .gnu = true}, stored);
  for (size_t i = 0; i < std::min<size_t>(runs.size(), 4); ++i) {
    block.replace(386 + 24 * i, 12, fmt::format("{:011o}", runs[i].offset) + '\0');
    block.replace(398 + 24 * i, 12, fmt::format("{:011o}", runs[i].length) + '\0');
  }
  block[482] = extended ? '\1' : '\0';
  block.replace(483, 12, fmt::format("{:011o}", size) + '\0');
  SetTarChecksum(block);
  return block;
}

TEST_F(ImportTarFormatTest, OldGnuSparseIsRead) {
  TarWriter tar;
  tar.Raw(OldSparseHeader({{4096, 4096}, {12288, 100}}, 12388, false));
  tar.Raw(Blocks('A', 1) + std::string(100, 'B')).File("after");
  const Tree tree = Import(tar.Finish());
  EXPECT_EQ(sink_.Read(At(tree, "x")),
            Blocks('\0', 1) + Blocks('A', 1) + Blocks('\0', 1) + std::string(100, 'B'));
  EXPECT_TRUE(Exists(tree, "after"));
}

TEST_F(ImportTarFormatTest, OldGnuSparseExtensionBlocksAreRead) {
  std::vector<SparseRun> runs;
  std::string expected;
  for (uint64_t i = 0; i < 30; ++i) {
    runs.push_back({(2 * i + 1) * kBlockSize, kBlockSize});
    expected += Blocks('\0', 1) + Blocks('A', 1);
  }
  TarWriter tar;
  tar.Raw(OldSparseHeader(runs, expected.size(), true));
  for (size_t begin = 4; begin < runs.size(); begin += 21) {
    std::string extension(512, '\0');
    for (size_t i = begin; i < std::min(begin + 21, runs.size()); ++i) {
      extension.replace(24 * (i - begin), 12, fmt::format("{:011o}", runs[i].offset) + '\0');
      extension.replace(24 * (i - begin) + 12, 12, fmt::format("{:011o}", runs[i].length) + '\0');
    }
    extension[504] = begin + 21 < runs.size() ? '\1' : '\0';
    tar.Raw(extension);
  }
  tar.Raw(Blocks('A', 30));
  EXPECT_EQ(sink_.Read(At(Import(tar.Finish()), "x")), expected);
}

TEST_F(ImportTarFormatTest, SparseMapsThatLieAreRefused) {
  const std::pair<const char*, const char*> cases[] = {{"0,4096,2048,1", "overlaps"},
                                                       {"4096,4096,0,1", "overlaps"},
                                                       {"8192,4096", "outside"},
                                                       {"18446744073709551615,2", "outside"},
                                                       {"0,18446744073709551615", "outside"},
                                                       {"0,1", "the archive holds 4096"},
                                                       {"0,8192", "the archive holds 4096"},
                                                       {"0", "no length"},
                                                       {"0,x", "not a decimal number"},
                                                       {",", "not a decimal number"}};
  for (const auto& [map, message] : cases) {
    TarWriter tar;
    tar.Pax({{"GNU.sparse.size", "8192"}, {"GNU.sparse.map", map}}).File("x", Blocks('A', 1));
    EXPECT_THAT(Error(tar.Finish()), AllOf(HasSubstr("\"x\""), HasSubstr(message))) << map;
  }
}

TEST_F(ImportTarFormatTest, SparseMapsInContentThatLieAreRefused) {
  const std::pair<std::string, const char*> cases[] = {{"", "content ends"},
                                                       {"1", "content ends"},
                                                       {"1\n0\n", "content ends"},
                                                       {"1048577\n", "too many sparse runs"},
                                                       {"x\n", "not a decimal number"},
                                                       {"111111111111111111111111\n", "too long"},
                                                       {std::string(512, '\0'), "too long"}};
  for (const auto& [content, message] : cases) {
    TarWriter tar;
    tar.Pax({{"GNU.sparse.major", "1"}, {"GNU.sparse.minor", "0"}, {"GNU.sparse.realsize", "1"}});
    tar.File("x", content);
    EXPECT_THAT(Error(tar.Finish()), AllOf(HasSubstr("\"x\""), HasSubstr(message))) << content;
  }
  EXPECT_THAT(Error(TarWriter().Pax({{"GNU.sparse.major", "2"}}).File("x").Finish()),
              HasSubstr("unknown version of the sparse format"));
}

TEST_F(ImportTarFormatTest, HolesThatAreSmallOrNotAlignedAreZeros) {
  TarWriter tar;
  tar.Pax({{"GNU.sparse.size", "20000"}, {"GNU.sparse.map", "100,50,4000,200,13000,10"}});
  tar.File("x", std::string(260, 'A'));
  const Inode inode = At(Import(tar.Finish()), "x");
  std::string expected(20000, '\0');
  expected.replace(100, 50, 50, 'A').replace(4000, 200, 200, 'A').replace(13000, 10, 10, 'A');
  EXPECT_EQ(sink_.Read(inode), expected);
  // 8192..12288 and 16384..20000
  EXPECT_EQ(sink_.hole_bytes(), 4096U + 3616U);
  EXPECT_EQ(inode.extents.size(), 2U);
}

TEST_F(ImportTarFormatTest, HoleUnitGrowsWithTheFile) {
  EXPECT_EQ(HoleUnit(0), 4096U);
  EXPECT_EQ(HoleUnit(1), 4096U);
  EXPECT_EQ(HoleUnit(uint64_t{256} << 20), 4096U);
  EXPECT_EQ(HoleUnit((uint64_t{256} << 20) + 1), 8192U);
  EXPECT_EQ(HoleUnit(uint64_t{64} << 30), uint64_t{1} << 20);
  EXPECT_EQ(HoleUnit(UINT64_MAX), uint64_t{1} << 20);
}

// Other entries.

TEST_F(ImportTarFormatTest, VolumeLabelsAreIgnored) {
  EXPECT_TRUE(Exists(
      Import(TarWriter().Add({.name = "label", .type = 'V', .gnu = true}).File("x").Finish()),
      "x"));
}

TEST_F(ImportTarFormatTest, IncrementalDumpDirectoriesAreDirectories) {
  const Tree tree =
      Import(TarWriter()
                 .Add({.name = "d/", .type = 'D', .content = std::string("Yx\0\0", 4), .gnu = true})
                 .File("d/x")
                 .Finish());
  EXPECT_TRUE(At(tree, "d").is_directory());
  EXPECT_TRUE(Exists(tree, "d/x"));
}

TEST_F(ImportTarFormatTest, SizesOfDirectoriesAndLinksAreNotContent) {
  TarWriter tar;
  tar.Raw(TarHeaderBlock({.name = "d", .type = '5'}, 4096));
  tar.Raw(TarHeaderBlock({.name = "s", .type = '2', .link = "target"}, 6)).File("after");
  EXPECT_TRUE(Exists(Import(tar.Finish()), "after"));
}

// Ends of archives.

TEST_F(ImportTarFormatTest, ArchiveWithoutEndBlocksIsWhole) {
  EXPECT_EQ(sink_.Read(At(Import(TarWriter().File("x", "data").bytes()), "x")), "data");
}

TEST_F(ImportTarFormatTest, ArchiveCutInThePaddingOfItsLastFileIsWhole) {
  const std::string archive = TarWriter().File("x", "data").bytes().substr(0, 512 + 4);
  EXPECT_EQ(sink_.Read(At(Import(archive), "x")), "data");
}

TEST_F(ImportTarFormatTest, OneEndBlockAtTheEndIsEnough) {
  EXPECT_TRUE(Exists(Import(TarWriter().File("x").bytes() + std::string(512, '\0')), "x"));
}

TEST_F(ImportTarFormatTest, LoneZeroBlockBeforeMoreIsAnError) {
  const std::string zeros(512, '\0');
  EXPECT_THAT(Error(TarWriter().File("x").Raw(zeros).File("y").Finish()),
              HasSubstr("lone block of zeros"));
}

TEST_F(ImportTarFormatTest, WhatFollowsTheEndIsReadAndIgnored) {
  const std::string archive =
      TarWriter().File("x").Finish() + TarWriter().File("y").Finish() + "garbage";
  size_t position = 0;
  auto read = [&](std::span<std::byte> into) -> absl::StatusOr<size_t> {
    const size_t length = archive.copy(reinterpret_cast<char*>(into.data()),
                                       std::min<size_t>(into.size(), 100), position);
    position += length;
    return length;
  };
  const absl::StatusOr<Tree> tree = ImportTar(read, sink_);
  ASSERT_TRUE(tree.ok()) << tree.status();
  EXPECT_TRUE(Exists(*tree, "x"));
  EXPECT_FALSE(Exists(*tree, "y"));
  EXPECT_EQ(position, archive.size());
}

TEST_F(ImportTarFormatTest, EveryTruncationIsAnErrorOrTheTreeSoFar) {
  const std::string archive =
      TarWriter().File("first", "data").Pax({{"uid", "5"}}).File("second", "more").bytes();
  for (size_t length = 0; length < archive.size(); ++length) {
    RecordingSink sink;
    const absl::StatusOr<Tree> tree = ImportBytes(archive.substr(0, length), sink);
    // Whole: nothing, the first file up to the end of its content or of its block, and likewise the
    // second with its extended header.
    const bool whole = length == 0 || (length >= 516 && length <= 1024) || length >= 2564;
    EXPECT_EQ(tree.ok(), whole) << length;
  }
}

TEST_F(ImportTarFormatTest, TruncatedHeaderIsAnErrorThatSaysWhere) {
  EXPECT_THAT(Error(TarWriter().File("x").bytes() + std::string(100, 'y')),
              HasSubstr("tar header at byte 512: archive ends within it"));
}

TEST_F(ImportTarFormatTest, TruncatedContentIsAnErrorThatNamesTheEntry) {
  const std::string archive = TarWriter().File("dir/x", std::string(1000, 'y')).bytes();
  EXPECT_THAT(Error(archive.substr(0, 900)),
              AllOf(HasSubstr("\"dir/x\""), HasSubstr("ends at byte 900, 612 bytes too early")));
}

TEST_F(ImportTarFormatTest, ArchiveThatEndsAfterAnExtendedHeaderIsAnError) {
  EXPECT_THAT(Error(TarWriter().Pax({{"uid", "5"}}).Finish()),
              HasSubstr("after an extended header"));
}

TEST_F(ImportTarFormatTest, WrongChecksumIsAnErrorThatSaysWhere) {
  std::string archive = TarWriter().File("a").File("b").Finish();
  archive[512] = 'c';
  EXPECT_THAT(Error(archive), HasSubstr("tar header at byte 512: checksum does not match"));
}

TEST_F(ImportTarFormatTest, SignedChecksumsOfOldProgramsAreTaken) {
  std::string block = TarHeaderBlock({.name = "\xff\xff"}, 0);
  int64_t sum = 0;
  block.replace(148, 8, 8, ' ');
  for (char byte : block) sum += static_cast<int8_t>(byte);
  block.replace(148, 7, fmt::format("{:06o}", sum) + '\0');
  EXPECT_TRUE(Exists(Import(TarWriter().Raw(block).Finish()), "\xff\xff"));
}

TEST_F(ImportTarFormatTest, SomethingElseThanAnArchiveIsRefused) {
  EXPECT_THAT(Error(std::string(2048, 'x')), HasSubstr("checksum does not match"));
  EXPECT_THAT(Error("hello"), HasSubstr("archive ends within it"));
}

TEST_F(ImportTarFormatTest, EntryWithoutANameIsAnError) {
  EXPECT_THAT(Error(TarWriter().File("").Finish()), HasSubstr("entry without a name"));
}

}  // namespace
}  // namespace lamina::erofs
