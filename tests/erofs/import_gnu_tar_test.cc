// SPDX-License-Identifier: Apache-2.0
//
// The same archive through ImportTar, and extracted with GNU tar and read with ImportDirectory:
// both trees must be equal in all attributes, content and holes. Archives are of GNU tar and of
// Python's tarfile. Needs root, for owners, devices and trusted xattrs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "chunkstore/base/file.h"
#include "erofs/import.h"
#include "tests/erofs/import_testing.h"

namespace lamina::erofs {
namespace {

using ::testing::HasSubstr;

class ImportGnuTarTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "extracting owners and devices needs root";
    absl::StatusOr<TemporaryDirectory> directory =
        TemporaryDirectory::Create(::testing::TempDir(), "import-gnu-tar");
    ASSERT_TRUE(directory.ok()) << directory.status();
    directory_.emplace(*std::move(directory));
  }

  std::string Path(std::string_view name) const {
    return fmt::format("{}/{}", directory_->path(), name);
  }

  // Runs shell commands in an empty directory, which then is the tree to archive.
  void MakeSource(const std::string& commands) {
    Shell(fmt::format("mkdir {0} && cd {0} && {1}", Path("source"), commands));
  }

  // Runs Python with an open archive `t` and a function add(name, content, **fields).
  void MakeArchive(const std::string& python) {
    WriteTestFile(Path("make.py"), fmt::format(R"(
import io, tarfile
from tarfile import DIRTYPE, SYMTYPE, LNKTYPE, CHRTYPE, BLKTYPE, FIFOTYPE
t = tarfile.open("{}", 'w', format=tarfile.PAX_FORMAT, encoding='utf-8', errors='surrogateescape')
def add(name, content=b'', **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    t.addfile(info, io.BytesIO(content))
{}
t.close()
)",
                                               Path("archive.tar"), python));
    Shell(fmt::format("python3 {}", Path("make.py")));
  }

  // Both trees of the archive as text.
  void ExpectSameAsExtracted(DescribeOptions options = {.extents = true}) {
    const absl::StatusOr<std::string> archive =
        ReadFileToString(Path("archive.tar"), uint64_t{1} << 30);
    ASSERT_TRUE(archive.ok()) << archive.status();
    RecordingSink imported_sink;
    const absl::StatusOr<Tree> imported = ImportBytes(*archive, imported_sink);
    ASSERT_TRUE(imported.ok()) << imported.status();

    Shell(
        fmt::format("rm -rf {0} && mkdir {0} && tar --numeric-owner --xattrs "
                    "--xattrs-include='*' --acls -C {0} -xpf {1}",
                    Path("extracted"), Path("archive.tar")));
    RecordingSink extracted_sink;
    const absl::StatusOr<Tree> extracted = ImportDirectory(Path("extracted"), extracted_sink);
    ASSERT_TRUE(extracted.ok()) << extracted.status();

    const std::string text = Describe(*imported, imported_sink, options);
    EXPECT_EQ(text, Describe(*extracted, extracted_sink, options));
    EXPECT_THAT(text, HasSubstr("\n"));
  }

  std::optional<TemporaryDirectory> directory_;
};

// A tree with something of every kind.
constexpr char kEverything[] = R"sh(
umask 022
mkdir -m 01777 sticky; mkdir -m 02755 setgid; mkdir -p deep/er/and/deeper; mkdir -m 0 closed
printf hello > file; : > empty; head -c 100000 /dev/urandom > random; chmod 4755 file
chown 12345:54321 file; chown 70000:3000000000 empty; chown 4294967294:4294967294 random
ln -s file symlink; ln -s /absolute/nowhere dangling; chown -h 5:6 symlink
ln file hard; ln symlink hardsymlink; mkdir links; ln file links/again
mkfifo -m 600 fifo; mknod null c 1 3; mknod block b 259 1048575; chown 0:6 block; ln null zero
setfattr -n user.text -v value file; setfattr -n user.binary -v 0x00ff0a3d00 file
setfattr -n user.empty file; setfattr -n trusted.t -v t deep; setfattr -h -n trusted.s -v s symlink
setfattr -n 'user.a=b%25%c' -v 1 empty; setfattr -n user.d -v d sticky
setfattr -n security.capability -v 0x0100000200040000000000000000000000000000 random
# GNU tar writes names of users that the machine knows, also with --numeric-owner: take others.
setfacl -m u:1234567:rwx,g:2345678:r-x,m::r-x file; setfacl -d -m u:0:r,u:76543:r,g::-,o::- deep
setfacl -m g:70001:w fifo
touch -d '2001-02-03 04:05:06.123456789' file; touch -d '1969-12-31 23:59:58.25 UTC' empty
touch -d '1901-12-14 00:00:00 UTC' sticky; touch -d '2300-01-01 00:00:00.999999999 UTC' random
touch -h -d '2005-05-05 05:05:05.5 UTC' symlink
truncate -s 1M hole; printf data | dd of=hole bs=4096 seek=10 conv=notrunc status=none
truncate -s 300000 tail; printf data | dd of=tail bs=1 conv=notrunc status=none
truncate -s 100M allhole
d=$(printf '%0200d' 1); n=$(printf '%0255d' 7)
mkdir -p "$d/$d"; : > "$d/$d/$n"; ln -s "$d/$d/$n" longlink; ln "$d/$d/$n" longhard
printf x > "$(printf 'raw-\377\376')"; printf x > "$(printf 'utf8-\303\251')"
printf x > "$(printf 'nfd-e\314\201')"; ln -s "$(printf 'raw-\377\376')" rawlink
printf x > "$(printf 'new\nline')"; printf x > 'back\slash'
touch -d @1234567890.5 deep closed setgid .
)sh";

TEST_F(ImportGnuTarTest, PaxArchiveOfGnuTar) {
  MakeSource(kEverything);
  Shell(
      fmt::format("tar --numeric-owner --format=posix --xattrs --xattrs-include='*' --acls -C {} "
                  "-cf {} .",
                  Path("source"), Path("archive.tar")));
  ExpectSameAsExtracted();
}

TEST_F(ImportGnuTarTest, PaxSparseArchivesOfGnuTar) {
  MakeSource(kEverything);
  for (const char* version : {"0.0", "0.1", "1.0"}) {
    SCOPED_TRACE(version);
    Shell(
        fmt::format("tar --numeric-owner --format=posix --sparse --sparse-version={} --xattrs "
                    "--xattrs-include='*' --acls -C {} -cf {} .",
                    version, Path("source"), Path("archive.tar")));
    ExpectSameAsExtracted();
  }
}

TEST_F(ImportGnuTarTest, GnuArchivesOfGnuTar) {
  MakeSource(kEverything);
  for (const char* sparse : {"", "--sparse"}) {
    SCOPED_TRACE(sparse);
    Shell(fmt::format("tar --numeric-owner --format=gnu {} -C {} -cf {} .", sparse, Path("source"),
                      Path("archive.tar")));
    ExpectSameAsExtracted();
  }
}

TEST_F(ImportGnuTarTest, UstarAndV7ArchivesOfGnuTar) {
  MakeSource(R"sh(mkdir -p a/b; printf x > a/b/f; ln -s b a/l; ln a/b/f a/h; chown 1:2 a/b/f
      mkdir -p $(printf '%090d' 1); : > $(printf '%090d' 1)/$(printf '%099d' 2)
      touch -d @1234567890 a/b a . 0*)sh");
  Shell(fmt::format("tar --numeric-owner --format=ustar -C {} -cf {} .", Path("source"),
                    Path("archive.tar")));
  ExpectSameAsExtracted();
  Shell(fmt::format("tar --numeric-owner --format=v7 -C {} -cf {} ./a", Path("source"),
                    Path("archive.tar")));
  ExpectSameAsExtracted({.root = false});
}

TEST_F(ImportGnuTarTest, SparseFileWithManyRuns) {
  MakeSource(R"sh(truncate -s 40M f
      for i in $(seq 0 7 9000); do printf data; done | dd of=f bs=4 conv=notrunc status=none
      python3 -c "
f = open('f', 'r+b')
for i in range(300):
    f.seek(i * 131072 + 5000)
    f.write(b'x' * (i * 17 + 1))
"
      touch -d @5 f .)sh");
  for (const char* format : {"--format=gnu", "--format=posix", "--sparse-version=0.1"}) {
    SCOPED_TRACE(format);
    Shell(fmt::format("tar --numeric-owner --sparse {} -C {} -cf {} .", format, Path("source"),
                      Path("archive.tar")));
    ExpectSameAsExtracted();
  }
}

TEST_F(ImportGnuTarTest, IncrementalArchiveWithVolumeLabel) {
  MakeSource("mkdir -p d/e; printf x > d/f; touch -d @5 d/f; touch -d @6 d/e d .");
  Shell(fmt::format(
      "tar --numeric-owner --format=gnu --listed-incremental={} -V label -C {} -cf {} .",
      Path("snapshot"), Path("source"), Path("archive.tar")));
  ExpectSameAsExtracted();
}

TEST_F(ImportGnuTarTest, ArchiveOfPythonWithOddTimesNumbersAndNames) {
  MakeArchive(R"py(
add('.', type=DIRTYPE, mode=0o755, mtime=5)
add('neg', b'x', mtime=-1.5)
add('neg2', b'x', pax_headers={'mtime': '-0.0000000001'})
add('big', b'y', uid=4294967294, gid=2097152, mtime=8589934592.25)
add('n' * 120 + '\udcff\udcfe', b'z')
add('ü' * 100, b'z')
add('sym', type=SYMTYPE, linkname='t\udcff' * 60)
add('hard', type=LNKTYPE, linkname='n' * 120 + '\udcff\udcfe')
add('caps', b'', pax_headers={'SCHILY.xattr.user.a': 'v'})
)py");
  ExpectSameAsExtracted();
}

TEST_F(ImportGnuTarTest, ArchiveOfPythonInGnuFormat) {
  MakeArchive(R"py(
t.format = tarfile.GNU_FORMAT
add('.', type=DIRTYPE, mode=0o755, mtime=5)
add('neg', b'x', mtime=-2)
add('big', b'y', uid=4294967294, gid=2097152, mtime=8589934592)
add('d' * 90 + '/' + 'n' * 120, b'z')
add('d' * 90, type=DIRTYPE, mode=0o700, mtime=7)
add('sym', type=SYMTYPE, linkname='t' * 160)
add('hard', type=LNKTYPE, linkname='d' * 90 + '/' + 'n' * 120)
)py");
  ExpectSameAsExtracted();
}

TEST_F(ImportGnuTarTest, PathsThatComeTwice) {
  MakeArchive(R"py(
add('.', type=DIRTYPE, mode=0o755, mtime=5)
add('f', b'old', mtime=1); add('f', b'new', mode=0o600, mtime=2)
add('d', type=DIRTYPE, mode=0o700, mtime=1, pax_headers={'SCHILY.xattr.user.one': '1'})
add('d/in', b'x')
add('d', type=DIRTYPE, mode=0o751, mtime=3, pax_headers={'SCHILY.xattr.user.two': '2'})
add('file-then-dir', b'x'); add('file-then-dir', type=DIRTYPE, mode=0o700, mtime=4)
add('dir-then-file', type=DIRTYPE); add('dir-then-file', b'x')
add('link-then-file', type=SYMTYPE, linkname='f'); add('link-then-file', b'x')
add('link-then-dir', type=SYMTYPE, linkname='d')
add('link-then-dir', type=DIRTYPE, mode=0o700, mtime=4)
add('file-then-link', b'x'); add('file-then-link', type=SYMTYPE, linkname='f')
add('old', b'1'); add('kept', type=LNKTYPE, linkname='old'); add('old', b'2')
add('self', b's'); add('self', type=LNKTYPE, linkname='self')
add('fifo', b'x'); add('fifo', type=FIFOTYPE)
add('attributes', b'a', mtime=3)
add('ignored', type=LNKTYPE, linkname='attributes', mode=0o777, uid=9, mtime=99)
)py");
  ExpectSameAsExtracted();
}

TEST_F(ImportGnuTarTest, AclTextsAndModes) {
  MakeArchive(R"py(
A, D, X = 'SCHILY.acl.access', 'SCHILY.acl.default', 'SCHILY.xattr.'
full = 'user::r--,user:1000:rwx,group::r-x,mask::r--,other::---'
add('.', type=DIRTYPE, mode=0o755, mtime=5)
add('wide', mode=0o777, pax_headers={A: full})
add('narrow', mode=0, pax_headers={A: full})
add('minimal', mode=0o777, pax_headers={A: 'user::r--,group::r-x,other::---'})
add('special', mode=0o6755,
    pax_headers={A: 'user::rwx,group:5:rwx,group::r-x,mask::r-x,other::---'})
add('default-on-file', mode=0o777, pax_headers={D: 'user::rwx,group::r-x,other::---'})
add('dir', type=DIRTYPE, mode=0o2777, mtime=1,
    pax_headers={A: full, D: 'user::rwx\nuser:0:r--\ngroup::r-x\nmask::r-x\nother::---\n'})
add('dir/inherits-nothing', mode=0o644)
add('symlink', type=SYMTYPE, linkname='x', pax_headers={X + 'user.u': '1', X + 'trusted.t': '2'})
add('apple', pax_headers={X + 'com.apple.quarantine': '1', X + 'user.u': '1'})
)py");
  ExpectSameAsExtracted();
}

}  // namespace
}  // namespace lamina::erofs
