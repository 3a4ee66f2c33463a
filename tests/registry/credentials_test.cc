// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/registry/credentials.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>

#include "chunkstore/base/file.h"

namespace lamina::registry {
namespace {

// What an auth file says: "user:password", "helper NAME", "nothing", or an error.
std::string Find(std::string_view json, std::string_view host,
                 std::string_view repository = "a/b") {
  const auto entry = FindInAuthFile(json, "auth.json", host, repository);
  if (!entry.ok()) return "error: " + entry.status().ToString();
  if (!entry->helper.empty()) return "helper " + entry->helper;
  if (!entry->credential) return "nothing";
  if (!entry->credential->identity_token.empty())
    return "token " + entry->credential->identity_token;
  return entry->credential->username + ":" + entry->credential->password;
}

TEST(CredentialsTest, ClosestEntryCounts) {
  constexpr std::string_view kFile = R"({"auths": {
    "h.x": {"auth": "aG9zdDpwdw=="},
    "h.x/a": {"auth": "YTpwdw=="},
    "h.x/a/b": {"auth": "YWI6cHc="},
    "other": {}}})";
  EXPECT_EQ(Find(kFile, "h.x", "a/b"), "ab:pw");
  EXPECT_EQ(Find(kFile, "h.x", "a/bb"), "a:pw");
  EXPECT_EQ(Find(kFile, "h.x", "aa"), "host:pw");
  EXPECT_EQ(Find(kFile, "h.x:443", "a"), "nothing");
  EXPECT_EQ(Find(kFile, "other"), "nothing");
}

TEST(CredentialsTest, KeysAsDockerWritesThem) {
  for (const char* key : {"h.x", "https://h.x", "http://h.x/v1/", "https://h.x/v2/", "h.x/v1"}) {
    EXPECT_EQ(Find(fmt::format(R"({{"auths": {{"{}": {{"auth": "dTpw"}}}}}})", key), "h.x"), "u:p")
        << key;
  }
  EXPECT_EQ(Find(R"({"auths": {"https://index.docker.io/v1/": {"auth": "dTpw"}}})", "docker.io"),
            "u:p");
  EXPECT_EQ(Find(R"({"auths": {"https://h.x.evil/v1/": {"auth": "dTpw"}}})", "h.x"), "nothing");
}

TEST(CredentialsTest, FormsOfAnEntry) {
  EXPECT_EQ(Find(R"({"auths": {"h": {"username": "u", "password": "p"}}})", "h"), "u:p");
  EXPECT_EQ(Find(R"({"auths": {"h": {"auth": "dTpwOnE="}}})", "h"), "u:p:q");
  EXPECT_EQ(Find(R"({"auths": {"h": {"auth": "dTo=", "identitytoken": "t"}}})", "h"), "token t");
  EXPECT_NE(Find(R"({"auths": {"h": {"auth": "!"}}})", "h").find("auths.h"), std::string::npos);
  EXPECT_NE(Find(R"({"auths": {"h": {"auth": 1}}})", "h").find("not a string"), std::string::npos);
}

TEST(CredentialsTest, HelpersAreNamed) {
  constexpr std::string_view kFile =
      R"({"auths": {"k": {"auth": "dTpw"}}, "credHelpers": {"h": "one"}, "credsStore": "all"})";
  EXPECT_EQ(Find(kFile, "h"), "helper one");
  EXPECT_EQ(Find(kFile, "k"), "u:p");
  EXPECT_EQ(Find(kFile, "other"), "helper all");
}

TEST(CredentialsTest, GivenOnesComeFirst) {
  CredentialSources sources;
  sources.given = {{"", {"any", "p", ""}}, {"h", {"exact", "p", ""}}};
  EXPECT_EQ((*FindCredential(sources, "h", "a"))->username, "exact");
  EXPECT_EQ((*FindCredential(sources, "other", "a"))->username, "any");
}

TEST(CredentialsTest, FilesInOrderAndMissingOnesPassedOver) {
  const auto directory = TemporaryDirectory::Create(testing::TempDir(), "lamina-auth-");
  ASSERT_TRUE(directory.ok());
  const std::string first = directory->path() + "/first";
  const std::string second = directory->path() + "/second";
  ASSERT_TRUE(WriteFileAtomically(first, R"({"auths": {"g": {"auth": "Zzpw"}}})").ok());
  ASSERT_TRUE(WriteFileAtomically(second, R"({"auths": {"h": {"auth": "aDpw"}}})").ok());
  const CredentialSources sources{.files = {directory->path() + "/none", first, second}};
  EXPECT_EQ((*FindCredential(sources, "g", "a"))->username, "g");
  EXPECT_EQ((*FindCredential(sources, "h", "a"))->username, "h");
  EXPECT_FALSE((*FindCredential(sources, "i", "a")).has_value());
  ASSERT_TRUE(WriteFileAtomically(first, "{").ok());
  const auto damaged = FindCredential(sources, "h", "a");
  EXPECT_NE(damaged.status().ToString().find(first), std::string::npos) << damaged.status();
}

TEST(CredentialsTest, WhatIsEmptyHasNoCredentials) {
  const auto directory = TemporaryDirectory::Create(testing::TempDir(), "lamina-auth-");
  ASSERT_TRUE(directory.ok());
  const std::string file = directory->path() + "/file";
  for (const char* content : {"", "\n", "{}"}) {
    ASSERT_TRUE(WriteFileAtomically(file, content).ok());
    const auto found = FindCredential({.files = {"/dev/null", file}}, "h", "a");
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_FALSE(found->has_value());
  }
}

TEST(CredentialsTest, OnlyRegularFilesAreRead) {
  const auto directory = TemporaryDirectory::Create(testing::TempDir(), "lamina-auth-");
  ASSERT_TRUE(directory.ok());
  const std::string fifo = directory->path() + "/fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {fifo, directory->path()}) {
    const auto found = FindCredential({.files = {path}}, "h", "a");
    EXPECT_NE(found.status().ToString().find("not a regular file"), std::string::npos)
        << found.status();
  }
}

// Sets variables, or removes those without a value, and puts back what was there.
class Environment {
 public:
  struct Variable {
    std::string name;
    const char* value;
  };
  explicit Environment(const std::vector<Variable>& variables) {
    for (const auto& [name, value] : variables) {
      const char* old = std::getenv(name.c_str());
      old_[name] = old == nullptr ? std::nullopt : std::optional<std::string>(old);
      Set(name, value);
    }
  }
  Environment(const Environment&) = delete;
  ~Environment() {
    for (const auto& [name, value] : old_) Set(name, value ? value->c_str() : nullptr);
  }

 private:
  static void Set(const std::string& name, const char* value) {
    if (value == nullptr) {
      ::unsetenv(name.c_str());
    } else {
      ::setenv(name.c_str(), value, 1);
    }
  }
  std::map<std::string, std::optional<std::string>> old_;
};

using Files = std::vector<std::string>;

TEST(CredentialsTest, FilesOfTheEnvironment) {
  const Environment environment({{"REGISTRY_AUTH_FILE", nullptr},
                                 {"XDG_RUNTIME_DIR", "/run/user/7"},
                                 {"XDG_CONFIG_HOME", nullptr},
                                 {"DOCKER_CONFIG", nullptr},
                                 {"HOME", "/home/u"}});
  EXPECT_EQ(*AuthFilesOfEnvironment(),
            (Files{"/run/user/7/containers/auth.json", "/home/u/.config/containers/auth.json",
                   "/home/u/.docker/config.json"}));
  // As podman has it where nobody has logged in to a session.
  const Environment no_session({Environment::Variable{"XDG_RUNTIME_DIR", nullptr}});
  if (::getuid() == 0) {
    EXPECT_EQ(AuthFilesOfEnvironment()->front(), "/run/containers/0/auth.json");
  }
  const Environment file({Environment::Variable{"REGISTRY_AUTH_FILE", "/a/b"}});
  EXPECT_EQ(*AuthFilesOfEnvironment(), Files{"/a/b"});
}

TEST(CredentialsTest, RelativeFilesAreInTheWorkingDirectory) {
  const std::string here = std::filesystem::current_path().string();
  const Environment docker({{"REGISTRY_AUTH_FILE", nullptr}, {"DOCKER_CONFIG", "d"}});
  EXPECT_EQ(AuthFilesOfEnvironment()->back(), here + "/d/config.json");
  const Environment file({Environment::Variable{"REGISTRY_AUTH_FILE", "a/b"}});
  EXPECT_EQ(*AuthFilesOfEnvironment(), Files{here + "/a/b"});
}

TEST(CredentialsTest, TextIsUserAndPassword) {
  EXPECT_EQ(Credential::Parse("u:p:q")->password, "p:q");
  EXPECT_EQ(Credential::Parse("u:")->password, "");
  for (const char* text : {"", "secret", ":secret"}) {
    const auto credential = Credential::Parse(text);
    EXPECT_FALSE(credential.ok());
    EXPECT_EQ(credential.status().ToString().find("secret"), std::string::npos);
  }
  EXPECT_EQ(Credential::Parse("Aladdin:open sesame")->Basic(),
            "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
}

TEST(CredentialsTest, HelperNamesCannotLeadElsewhere) {
  const auto directory = TemporaryDirectory::Create(testing::TempDir(), "lamina-auth-");
  ASSERT_TRUE(directory.ok());
  const std::string file = directory->path() + "/file";
  for (const char* name : {"../../bin/sh", "x/y", "none-of-that-name"}) {
    ASSERT_TRUE(WriteFileAtomically(file, fmt::format(R"({{"credsStore": "{}"}})", name)).ok());
    EXPECT_FALSE(FindCredential({.files = {file}}, "h", "a").ok()) << name;
  }
}

}  // namespace
}  // namespace lamina::registry
