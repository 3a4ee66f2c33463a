// SPDX-License-Identifier: Apache-2.0

// What tests ask of containerd that ctr cannot: pulls that unpack while they fetch, as clients of
// containerd do, and as Kubernetes does (CRI).
//
//	client ADDRESS NAMESPACE pull REFERENCE [SNAPSHOTTER]
//	                                                 containerd's Go client
//	client ADDRESS NAMESPACE pull-labels REFERENCE   the same, telling the snapshotter of the image
//	client ADDRESS NAMESPACE cri-pull REFERENCE
//	client ADDRESS NAMESPACE commit CONTAINER IMAGE  a new image: that of the container, and its changes
//	client ADDRESS NAMESPACE prepare IMAGE KEY LABEL=VALUE
//	                                                 an active snapshot on an image, with a label
//	client ADDRESS NAMESPACE times PARENT COUNT      milliseconds of Prepare and Mounts together, median
//	                                                 and maximum; ADDRESS is the snapshotter's own
//
// To be built with Debian's golang-github-containerd-containerd-dev.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/content"
	"github.com/containerd/containerd/images"
	"github.com/containerd/containerd/namespaces"
	"github.com/containerd/containerd/pkg/dialer"
	"github.com/containerd/containerd/pkg/snapshotters"
	"github.com/containerd/containerd/platforms"
	"github.com/containerd/containerd/remotes/docker"
	"github.com/containerd/containerd/rootfs"
	"github.com/containerd/containerd/snapshots"
	"github.com/containerd/containerd/snapshots/proxy"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	specs "github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
)

const lamina = "lamina"

func pull(ctx context.Context, client *containerd.Client, reference, snapshotter string, labels bool) error {
	options := []containerd.RemoteOpt{
		containerd.WithPullUnpack,
		containerd.WithPullSnapshotter(snapshotter),
		containerd.WithResolver(docker.NewResolver(docker.ResolverOptions{
			Hosts: docker.ConfigureDefaultRegistries(docker.WithPlainHTTP(docker.MatchLocalhost))})),
	}
	if labels {
		options = append(options,
			containerd.WithImageHandlerWrapper(snapshotters.AppendInfoHandlerWrapper(reference)))
	}
	_, err := client.Pull(ctx, reference, options...)
	return err
}

// Messages go as they are: CRI's definitions are not packaged.
type rawCodec struct{}

func (rawCodec) Marshal(message interface{}) ([]byte, error) { return *message.(*[]byte), nil }
func (rawCodec) Unmarshal(data []byte, message interface{}) error {
	*message.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (rawCodec) Name() string { return "raw" }

// A protobuf field of bytes.
func field(number byte, value []byte) []byte {
	length := make([]byte, binary.MaxVarintLen64)
	length = length[:binary.PutUvarint(length, uint64(len(value)))]
	return bytes.Join([][]byte{{number<<3 | 2}, length, value}, nil)
}

func criPull(ctx context.Context, address, reference string) error {
	connection, err := grpc.Dial(dialer.DialAddress(address), grpc.WithInsecure(),
		grpc.WithContextDialer(dialer.ContextDialer))
	if err != nil {
		return err
	}
	request := field(1, field(1, []byte(reference))) // PullImageRequest.image.image
	response := []byte{}
	return connection.Invoke(ctx, "/runtime.v1.ImageService/PullImage", &request, &response,
		grpc.ForceCodec(rawCodec{}))
}

func times(ctx context.Context, address, parent string, count int) error {
	connection, err := grpc.Dial(dialer.DialAddress(address), grpc.WithInsecure(),
		grpc.WithContextDialer(dialer.ContextDialer))
	if err != nil {
		return err
	}
	defer connection.Close()
	service := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(connection), lamina)
	took := make([]time.Duration, count)
	for i := range took {
		key := fmt.Sprintf("times-%d", i)
		start := time.Now()
		if _, err := service.Prepare(ctx, key, parent); err != nil {
			return err
		}
		if _, err := service.Mounts(ctx, key); err != nil {
			return err
		}
		took[i] = time.Since(start)
		if err := service.Remove(ctx, key); err != nil {
			return err
		}
	}
	sort.Slice(took, func(i, j int) bool { return took[i] < took[j] })
	fmt.Printf("%.3f %.3f\n", took[count/2].Seconds()*1e3, took[count-1].Seconds()*1e3)
	return nil
}

func write(ctx context.Context, store content.Store, mediaType string, value interface{},
	labels map[string]string) (ocispec.Descriptor, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	descriptor := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data),
		Size: int64(len(data))}
	err = content.WriteBlob(ctx, store, descriptor.Digest.String(), bytes.NewReader(data), descriptor,
		content.WithLabels(labels))
	return descriptor, err
}

func commit(ctx context.Context, client *containerd.Client, id, name string) error {
	ctx, done, err := client.WithLease(ctx)
	if err != nil {
		return err
	}
	defer done(ctx)
	container, err := client.LoadContainer(ctx, id)
	if err != nil {
		return err
	}
	info, err := container.Info(ctx)
	if err != nil {
		return err
	}
	image, err := container.Image(ctx)
	if err != nil {
		return err
	}
	store := client.ContentStore()
	service := client.SnapshotService(info.Snapshotter)
	layer, err := rootfs.CreateDiff(ctx, info.SnapshotKey, service, client.DiffService())
	if err != nil {
		return err
	}
	stored, err := store.Info(ctx, layer.Digest)
	if err != nil {
		return err
	}
	diffID, err := digest.Parse(stored.Labels["containerd.io/uncompressed"])
	if err != nil {
		return err
	}
	manifest, err := images.Manifest(ctx, store, image.Target(), platforms.Default())
	if err != nil {
		return err
	}
	configData, err := content.ReadBlob(ctx, store, manifest.Config)
	if err != nil {
		return err
	}
	var config ocispec.Image
	if err := json.Unmarshal(configData, &config); err != nil {
		return err
	}
	config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, diffID)
	committed := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2},
		Layers: append(manifest.Layers, layer)}
	committed.Config, err = write(ctx, store, ocispec.MediaTypeImageConfig, config, nil)
	if err != nil {
		return err
	}
	labels := map[string]string{"containerd.io/gc.ref.content.config": committed.Config.Digest.String()}
	for i, layer := range committed.Layers {
		labels[fmt.Sprintf("containerd.io/gc.ref.content.l.%d", i)] = layer.Digest.String()
	}
	target, err := write(ctx, store, ocispec.MediaTypeImageManifest, committed, labels)
	if err != nil {
		return err
	}
	created, err := client.ImageService().Create(ctx, images.Image{Name: name, Target: target})
	if err != nil {
		return err
	}
	return containerd.NewImage(client, created).Unpack(ctx, lamina)
}

func prepare(ctx context.Context, client *containerd.Client, name, key, label string) error {
	image, err := client.GetImage(ctx, name)
	if err != nil {
		return err
	}
	diffIDs, err := image.RootFS(ctx)
	if err != nil {
		return err
	}
	parts := strings.SplitN(label, "=", 2)
	_, err = client.SnapshotService(lamina).Prepare(ctx, key, identity.ChainID(diffIDs).String(),
		snapshots.WithLabels(map[string]string{parts[0]: parts[1]}))
	return err
}

func run(arguments []string) error {
	if len(arguments) < 4 {
		return fmt.Errorf("usage: client ADDRESS NAMESPACE COMMAND ARGUMENT...")
	}
	address, command, reference := arguments[0], arguments[2], arguments[3]
	ctx := namespaces.WithNamespace(context.Background(), arguments[1])
	if command == "times" {
		count, err := strconv.Atoi(arguments[4])
		if err != nil {
			return err
		}
		return times(ctx, address, reference, count)
	}
	if command == "cri-pull" {
		return criPull(ctx, address, reference)
	}
	client, err := containerd.New(address)
	if err != nil {
		return err
	}
	defer client.Close()
	switch command {
	case "pull", "pull-labels":
		snapshotter := lamina
		if len(arguments) > 4 {
			snapshotter = arguments[4]
		}
		return pull(ctx, client, reference, snapshotter, command == "pull-labels")
	case "prepare":
		return prepare(ctx, client, reference, arguments[4], arguments[5])
	case "commit":
		return commit(ctx, client, reference, arguments[4])
	}
	return fmt.Errorf("unknown command %q", command)
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
