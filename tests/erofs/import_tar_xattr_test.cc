// SPDX-License-Identifier: Apache-2.0
//
// Extended attributes and ACLs in archives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "erofs/import.h"
#include "erofs/posix_acl.h"
#include "tests/erofs/import_testing.h"

namespace lamina::erofs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Records = std::vector<std::pair<std::string, std::string>>;

constexpr std::string_view kXattr = "SCHILY.xattr.";
constexpr char kAccess[] = "system.posix_acl_access";
constexpr char kDefault[] = "system.posix_acl_default";

absl::StatusOr<Inode> ImportOne(const Records& records, TarFields fields = {}) {
  CountingSink sink;
  fields.name = "x";
  ASSIGN_OR_RETURN(const Tree tree,
                   ImportBytes(TarWriter().Pax(records).Add(fields).Finish(), sink));
  return At(tree, "x");
}

Inode Import(const Records& records, TarFields fields = {}) {
  absl::StatusOr<Inode> inode = ImportOne(records, fields);
  EXPECT_TRUE(inode.ok()) << inode.status();
  return inode.ok() ? *inode : Inode();
}

std::string Error(const Records& records, TarFields fields = {}) {
  absl::StatusOr<Inode> inode = ImportOne(records, fields);
  EXPECT_FALSE(inode.ok());
  return std::string(inode.status().message());
}

std::string Name(std::string_view name) { return fmt::format("{}{}", kXattr, name); }

// The xattr's bytes of an ACL, from entries of tag, permissions and id.
std::string AclBytes(const PosixAcl& acl) { return FormatAclXattr(acl); }

TEST(ImportTarXattrTest, ValuesAreBytes) {
  const std::string value("\0\xff=\n binary", 11);
  EXPECT_EQ(XattrOf(Import({{Name("user.b"), value}}), "user.b"), value);
}

TEST(ImportTarXattrTest, FileCapabilitiesAreKept) {
  const std::string capability("\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 20);
  EXPECT_EQ(XattrOf(Import({{Name("security.capability"), capability}}), "security.capability"),
            capability);
}

TEST(ImportTarXattrTest, AllNameSpacesOfTheKernelAreKeptSortedByName) {
  const Inode inode = Import({{Name("user.z"), "1"},
                              {Name("trusted.t"), "2"},
                              {Name("security.selinux"), "3"},
                              {Name("user.a"), "4"}});
  ASSERT_EQ(inode.xattrs.size(), 4U);
  EXPECT_EQ(inode.xattrs[0], (Xattr{"security.selinux", "3"}));
  EXPECT_EQ(inode.xattrs[1], (Xattr{"trusted.t", "2"}));
  EXPECT_EQ(inode.xattrs[2], (Xattr{"user.a", "4"}));
  EXPECT_EQ(inode.xattrs[3], (Xattr{"user.z", "1"}));
}

TEST(ImportTarXattrTest, EmptyValueIsAnXattr) {
  EXPECT_EQ(XattrOf(Import({{Name("user.e"), ""}}), "user.e"), "");
}

TEST(ImportTarXattrTest, LastOfEqualNamesCounts) {
  EXPECT_EQ(XattrOf(Import({{Name("user.e"), "1"}, {Name("user.e"), "2"}}), "user.e"), "2");
}

TEST(ImportTarXattrTest, EqualsAndPercentInNamesAreDecodedAsGnuTarDoes) {
  EXPECT_EQ(XattrOf(Import({{Name("user.a%3Db%25c%41"), "v"}}), "user.a=b%c%41"), "v");
}

TEST(ImportTarXattrTest, LibarchiveFormIsUnderstoodAndTheOtherFormPreferred) {
  const Inode inode = Import({{"LIBARCHIVE.xattr.user.%C3%A9", "AAEC"},
                              {"LIBARCHIVE.xattr.user.both", "b2xk"},
                              {Name("user.both"), "new"}});
  EXPECT_EQ(XattrOf(inode, "user.\xc3\xa9"), std::string("\0\1\2", 3));
  EXPECT_EQ(XattrOf(inode, "user.both"), "new");
  EXPECT_THAT(Error({{"LIBARCHIVE.xattr.user.x", "!!"}}), HasSubstr("not base64"));
}

TEST(ImportTarXattrTest, OtherNameSpacesAreDropped) {
  EXPECT_TRUE(Import({{Name("com.apple.quarantine"), "1"},
                      {Name("system.nfs4_acl"), "1"},
                      {Name("usery.x"), "1"}})
                  .xattrs.empty());
}

TEST(ImportTarXattrTest, OverlayInstructionsFromOutsideAreDropped) {
  const Records records = {{Name("trusted.overlay.redirect"), "/etc"},
                           {Name("trusted.overlay.metacopy"), ""},
                           {Name("trusted.overlay.opaque"), "y"},
                           {Name("user.overlay.opaque"), "y"},
                           {"LIBARCHIVE.xattr.trusted.overlay.origin", "AA"}};
  EXPECT_TRUE(Import(records, {.type = '5'}).xattrs.empty());
  EXPECT_TRUE(Import(records).xattrs.empty());
}

TEST(ImportTarXattrTest, UserXattrsStayOnFilesAndDirectoriesOnly) {
  const Records records = {{Name("user.u"), "1"}, {Name("trusted.t"), "2"}};
  EXPECT_EQ(Import(records).xattrs.size(), 2U);
  EXPECT_EQ(Import(records, {.type = '5'}).xattrs.size(), 2U);
  for (char type : {'2', '3', '4', '6'}) {
    const Inode inode = Import(records, {.type = type, .link = "t", .major = 1});
    ASSERT_EQ(inode.xattrs.size(), 1U) << type;
    EXPECT_EQ(inode.xattrs[0].name, "trusted.t");
  }
}

TEST(ImportTarXattrTest, NamesAndSizesBeyondTheKernelsAreRefused) {
  const std::string name = "user." + std::string(250, 'n');
  EXPECT_EQ(XattrOf(Import({{Name(name), "v"}}), name), "v");
  EXPECT_THAT(Error({{Name(name + "n"), "v"}}), HasSubstr("not a possible name"));
  EXPECT_THAT(Error({{Name("user."), "v"}}), HasSubstr("not a possible name"));
  EXPECT_THAT(Error({{Name(std::string("user.a\0b", 8)), "v"}}), HasSubstr("not a possible name"));
  const std::string value(65536, 'v');
  EXPECT_EQ(XattrOf(Import({{Name("user.v"), value}}), "user.v"), value);
  EXPECT_THAT(Error({{Name("user.v"), value + "v"}}),
              AllOf(HasSubstr("\"x\""), HasSubstr("65537 bytes")));
}

// Access control lists. What GNU tar makes of the same texts is in import_gnu_tar_test.cc.

using Tag = AclEntry::Tag;

TEST(ImportTarXattrTest, TextAclBecomesTheXattrOfTheKernel) {
  const Inode inode =
      Import({{"SCHILY.acl.access", "user::rw-,user:1000:r--,group::r--,mask::rw-,other::---"}},
             {.mode = 0660});
  EXPECT_EQ(XattrOf(inode, kAccess), std::string("\2\0\0\0"
                                                 "\1\0\6\0\xff\xff\xff\xff"
                                                 "\2\0\4\0\xe8\3\0\0"
                                                 "\4\0\4\0\xff\xff\xff\xff"
                                                 "\x10\0\6\0\xff\xff\xff\xff"
                                                 "\x20\0\0\0\xff\xff\xff\xff",
                                                 44));
  EXPECT_EQ(inode.mode, S_IFREG | 0660);
}

TEST(ImportTarXattrTest, AclDecidesThePermissionBits) {
  const Inode inode =
      Import({{"SCHILY.acl.access", "user::r--,user:1000:rwx,group::r-x,mask::r--,other::---"}},
             {.mode = 06777});
  EXPECT_EQ(inode.mode, S_IFREG | 06440);
}

TEST(ImportTarXattrTest, AclThatSaysNoMoreThanTheModeGoesIntoIt) {
  const Inode inode =
      Import({{"SCHILY.acl.access", "user::rwx,group::r-x,other::---"}}, {.mode = 0777});
  EXPECT_EQ(inode.mode, S_IFREG | 0750);
  EXPECT_TRUE(inode.xattrs.empty());
}

TEST(ImportTarXattrTest, DefaultAclIsKeptOnDirectoriesAlone) {
  const Records records = {{"SCHILY.acl.default", "user::rwx,group::r-x,other::---"}};
  EXPECT_EQ(XattrOf(Import(records, {.type = '5', .mode = 0777}), kDefault),
            AclBytes({{.tag = Tag::kOwner, .permissions = 7},
                      {.tag = Tag::kOwningGroup, .permissions = 5},
                      {.tag = Tag::kOther, .permissions = 0}}));
  const Inode file = Import(records, {.mode = 0777});
  EXPECT_TRUE(file.xattrs.empty());
  EXPECT_EQ(file.mode, S_IFREG | 0777);
}

TEST(ImportTarXattrTest, FormsOfAclTextAreUnderstood) {
  const std::string expected = AclBytes({{.tag = Tag::kOwner, .permissions = 7},
                                         {.tag = Tag::kUser, .id = 0, .permissions = 4},
                                         {.tag = Tag::kUser, .id = 77, .permissions = 6},
                                         {.tag = Tag::kOwningGroup, .permissions = 5},
                                         {.tag = Tag::kGroup, .id = 9, .permissions = 1},
                                         {.tag = Tag::kMask, .permissions = 7},
                                         {.tag = Tag::kOther, .permissions = 0}});
  for (const char* text :
       {"user::rwx,user:root:r--,user:77:rw-,group::r-x,group:9:--x,mask::rwx,other::---",
        "# file: x\nuser::rwx\nuser:0:r--\nuser:joe:rw-:77\ngroup::r-x\t#effective:r-x\n"
        "group:adm:--x:9\nmask::rwx\nother::---\n",
        "u::rwx,o:-,m:rwx,g:9:x,g::rx,u:77:rw,u:0:r"}) {
    EXPECT_EQ(XattrOf(Import({{"SCHILY.acl.access", text}}), kAccess), expected) << text;
  }
}

TEST(ImportTarXattrTest, TextOfAnAclCountsMoreThanItsBinaryForm) {
  const PosixAcl acl = {{.tag = Tag::kOwner, .permissions = 7},
                        {.tag = Tag::kUser, .id = 5, .permissions = 4},
                        {.tag = Tag::kOwningGroup, .permissions = 0},
                        {.tag = Tag::kMask, .permissions = 4},
                        {.tag = Tag::kOther, .permissions = 0}};
  const Inode inode =
      Import({{Name(kAccess), AclBytes({{.tag = Tag::kOwner, .permissions = 0},
                                        {.tag = Tag::kOwningGroup, .permissions = 0},
                                        {.tag = Tag::kOther, .permissions = 0}})},
              {"SCHILY.acl.access", "user::rwx,user:5:r--,group::---,mask::r--,other::---"}});
  EXPECT_EQ(XattrOf(inode, kAccess), AclBytes(acl));
  EXPECT_EQ(inode.mode, S_IFREG | 0740);
}

TEST(ImportTarXattrTest, InvalidAclsAreErrorsThatNameTheEntry) {
  const std::pair<const char*, const char*> cases[] = {
      {"user::rwx,user:1:rwx,group::r-x,other::---", "without a mask"},
      {"user::rwx,group::r-x", "owner, group and others"},
      {"user::rwx,user::rwx,group::r-x,other::---", "two entries"},
      {"user::rwx,user:1:r,user:1:w,group::r,mask::r,other::-", "two entries"},
      {"user::rwx,user:joe:r,group::r,mask::r,other::-", "no numeric id"},
      {"user::rwz,group::r,other::-", "unknown permissions"},
      {"world::rwx,group::r,other::-", "unknown kind"},
      {"user:::::rwx,group::r,other::-", "number of fields"}};
  for (const auto& [text, message] : cases) {
    EXPECT_THAT(Error({{"SCHILY.acl.access", text}}), AllOf(HasSubstr("\"x\""), HasSubstr(message)))
        << text;
  }
  EXPECT_THAT(Error({{Name(kAccess), "\2"}}), HasSubstr("ACL of 1 bytes"));
  EXPECT_THAT(Error({{Name(kAccess), std::string("\3\0\0\0", 4)}}), HasSubstr("unknown version"));
  EXPECT_THAT(Error({{Name(kAccess), std::string("\2\0\0\0\3\0\0\0\0\0\0\0", 12)}}),
              HasSubstr("tag 0x3"));
}

}  // namespace
}  // namespace lamina::erofs
