// An external grader in Node.js: `npm install && node server.js 127.0.0.1:50072 [directory of the protos]`.
// Then `reward: {backend: grpc, endpoint: "127.0.0.1:50072"}` in the run's config.
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address = "127.0.0.1:50072", protos = path.join(__dirname, "../../../protos")] = process.argv.slice(2);
const definition = loader.loadSync("sextet/v1/reward.proto", { includeDirs: [protos], keepCase: true });
const { RewardService } = grpc.loadPackageDefinition(definition).sextet.v1;

function grade(item) {
  if (!item.ground_truth) return { error: "this item has no ground truth" };
  const exact = item.response.trim() === item.ground_truth ? 1 : 0;
  return { score: exact, parts: { length: item.response.length } };
}

const server = new grpc.Server();
server.addService(RewardService.service, {
  score: (call, done) => done(null, { results: (call.request.items ?? []).map(grade) }),
});
server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(`listening on port ${port}`);
});
