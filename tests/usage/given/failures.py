from evenstep.contrib.elastic.membership import coordination

lighthouse = coordination().LighthouseServer(bind="localhost:0", min_replicas=1)
environ = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "NUM_REPLICA_GROUPS": "2", "REPLICA_GROUP_ID": "0"}


def use():
    lighthouse.shutdown()
