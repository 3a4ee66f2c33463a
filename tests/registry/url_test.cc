// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/http/url.h"

#include <gtest/gtest.h>

namespace lamina::http {
namespace {

TEST(UrlTest, PartsAndDefaults) {
  const auto url = Url::Parse("HTTPS://Registry.Example/v2/?a=b#c");
  ASSERT_TRUE(url.ok()) << url.status();
  EXPECT_EQ(url->scheme, "https");
  EXPECT_EQ(url->host, "registry.example");
  EXPECT_EQ(url->port, "443");
  EXPECT_TRUE(url->text.ends_with("/v2/?a=b")) << url->text;
  EXPECT_TRUE(url->SameOrigin(*Url::Parse("https://registry.example:443/other")));
  for (const char* other : {"http://registry.example:443/", "https://registry.example:444/",
                            "https://registry.example.evil/", "https://example/"}) {
    EXPECT_FALSE(url->SameOrigin(*Url::Parse(other))) << other;
  }
}

TEST(UrlTest, RelativeReferences) {
  const Url base = *Url::Parse("https://h:5000/v2/a/blobs/x?y=z");
  EXPECT_EQ(base.Resolve("/other")->text, "https://h:5000/other");
  EXPECT_EQ(base.Resolve("next")->text, "https://h:5000/v2/a/blobs/next");
  EXPECT_EQ(base.Resolve("//g/x")->host, "g");
  EXPECT_EQ(base.Resolve("http://g/x")->scheme, "http");
  EXPECT_FALSE(base.Resolve("file:///etc/passwd").ok());
  EXPECT_FALSE(base.Resolve("gopher://h/").ok());
}

TEST(UrlTest, RefusesPasswordsAndDoesNotRepeatThem) {
  const auto url = Url::Parse("https://user:s3cret@h/");
  ASSERT_FALSE(url.ok());
  EXPECT_EQ(url.status().ToString().find("s3cret"), std::string::npos);
}

TEST(UrlTest, RefusesWhatIsNone) {
  for (const std::string& text :
       {std::string(""), std::string("h"), std::string("https://"), std::string("ftp://h/"),
        std::string("https://h:99999/"), std::string("https://h\0.evil/", 16)}) {
    EXPECT_FALSE(Url::Parse(text).ok()) << text;
  }
}

TEST(UrlTest, Loopback) {
  for (const char* host : {"localhost", "LOCALHOST", "127.0.0.1", "127.255.0.9", "[::1]", "::1"}) {
    EXPECT_TRUE(IsLoopback(host)) << host;
  }
  for (const char* host : {"", "localhost.evil", "127.0.0.1.evil", "127.0.0", "128.0.0.1",
                           "127.0.0.256", "10.0.0.1", "[::2]", "127.0.0.1x"}) {
    EXPECT_FALSE(IsLoopback(host)) << host;
  }
}

TEST(UrlTest, EscapesAllButUnreserved) {
  EXPECT_EQ(Escape("aZ0-._~:/ é"), "aZ0-._~%3A%2F%20%C3%A9");
}

}  // namespace
}  // namespace lamina::http
